"""npu-replay compare: files that save wrote and folders of RouteStore, against differences made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from npu_replay import ReplayError, RoutedExperts, RouteStore, fingerprint
from npu_replay.cli.commands import app
from npu_replay.errors import InvalidRoutes
from npu_replay.inspection.compare import Comparison, compare_paths, percent

TOKENS, LAYERS, EXPERTS, TOPK = 100, (1, 2, 5), 16, 4


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture
def ids() -> torch.Tensor:
    """[tokens, layers, topk], from experts 0 to 11: 12 to 15 are there to differ."""
    scores = torch.rand(TOKENS, len(LAYERS), 12, generator=torch.Generator().manual_seed(7))
    return scores.topk(TOPK).indices


def routes(ids: torch.Tensor, **about: Any) -> RoutedExperts:
    known = {"layers": LAYERS, "num_experts": EXPERTS, "fingerprint": fingerprint(list(range(len(ids))))}
    return RoutedExperts(ids=ids, **(known | about))


def changed(ids: torch.Tensor) -> torch.Tensor:
    """Layer 2: one other expert in ten tokens. Layer 5: two in five of them. Everywhere another order."""
    others = ids.clone()
    others[:10, 1, 0] = 12
    others[:5, 2, 1:3] = torch.tensor([13, 15])
    return others.flip(dims=[2])


def saved(path: Path, what: RoutedExperts) -> Path:
    what.save(path)
    return path


def store(folder: Path, samples: dict[str | None, RoutedExperts]) -> Path:
    with RouteStore.writer(folder) as writer:
        for key, one in samples.items():
            writer.add(one, key)
    return folder


def table(result: Result) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    rows = [line.split() for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and (row[0].isdigit() or row[0] == "all")}


def refused(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    line, _hint = result.stderr.splitlines()
    return line


# Files


def test_equal_files_are_the_same(tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor) -> None:
    a, b = saved(tmp_path / "a", routes(ids)), saved(tmp_path / "b", routes(ids.flip(dims=[2])))
    result = run(a, b)
    assert result.exit_code == 0, result.stderr
    assert "the same: every token" in result.stdout
    assert table(result) == {row: ["100", "0.00%", "0.00%"] for row in ("1", "2", "5", "all")}


def test_differences_are_counted_by_layer(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    a, b = saved(tmp_path / "a", routes(ids)), saved(tmp_path / "b", routes(changed(ids)))
    result = run(a, b)
    assert result.exit_code == 0, result.stderr
    assert table(result) == {
        "1": ["100", "0.00%", "0.00%"],
        "2": ["100", "10.00%", "2.50%"],
        "5": ["100", "5.00%", "2.50%"],
        "all": ["100", "5.00%", "1.67%"],
    }
    last = result.stdout.splitlines()[-1]
    assert last.startswith("different: 5.00% of token-layers, 1.67% of experts; 10.00% of tokens differ")


def test_rows_without_a_route_are_left_out_and_told_of(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    rows = torch.arange(TOKENS)
    a = saved(tmp_path / "a", routes(ids, recorded=rows >= 2))
    b = saved(tmp_path / "b", routes(changed(ids), recorded=rows < 99))
    result = run(a, b)
    assert "97 of 100 tokens compared; rows without a route: 2 in A, 1 in B" in result.stdout
    found = compare_paths(a, b)
    assert (found.layers[2].differing, found.layers[5].differing, found.differing_tokens) == (8, 3, 8)
    assert (found.layers[5].differing_experts, found.layers[5].experts) == (6, 97 * TOPK)


def test_without_a_fingerprint_it_says_what_it_did_not_check(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    a, b = saved(tmp_path / "a", routes(ids)), saved(tmp_path / "b", routes(ids, fingerprint=None))
    assert "not checked: that the tokens are the same" in run(a, b).stdout
    assert "not checked" not in run(a, a).stdout


OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"layers": (1, 2, 6)},
        ["other layers", "Expected layers 1 to 2, 5, got layers 1 to 2, 6", "two models"],
    ),
    ({"num_experts": 32}, ["number of experts", "Expected 16, got 32"]),
    ({"fingerprint": 7}, ["other sequences", "got 0000000000000007", "sampled anew"]),
    ({"recorded": torch.zeros(TOKENS, dtype=torch.bool)}, ["nothing in common", "0 common rows"]),
]


@pytest.mark.parametrize(("about", "words"), OTHERS, ids=lambda value: next(iter(value)))
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor, about: dict[str, Any], words: list[str]
) -> None:
    a, b = saved(tmp_path / "a", routes(ids)), saved(tmp_path / "b", routes(ids, **about))
    line = refused(run(a, b))
    assert [word for word in [f"{a} and {b}: ", *words] if word not in line] == [], line


def test_other_sizes_are_refused(tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor) -> None:
    a = saved(tmp_path / "a", routes(ids, fingerprint=None))
    shorter = saved(tmp_path / "b", routes(ids[:50], fingerprint=None))
    assert "differ in tokens. Expected 100, got 50" in refused(run(a, shorter))
    fewer = saved(tmp_path / "c", routes(ids[..., :3]))
    assert "differ in top-k. Expected 4, got 3" in refused(run(a, fewer))


def test_what_is_no_file_of_routes_is_refused(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    good, bad = saved(tmp_path / "a", routes(ids)), tmp_path / "b"
    assert f"{bad}: there is no such file or folder" in refused(run(good, bad))
    bad.write_bytes(b"garbage")
    assert f"{bad}: this file can't be read as routes" in refused(run(bad, good))
    assert "no plain file" in refused(run(good, "/dev/zero"))


def test_a_file_against_a_folder_is_refused(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    file, folder = saved(tmp_path / "a", routes(ids)), store(tmp_path / "b", {None: routes(ids)})
    for arguments in ((file, folder), (folder, file)):
        line = refused(run(*arguments))
        assert "a folder and a file can't be compared" in line
        assert f"got the folder {folder} and the file {file}" in line


# Folders


def test_folders_are_compared_sample_by_sample_and_added_up(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    half = routes(ids[:50])
    a = store(tmp_path / "a", {"one": routes(ids), "two": half, "mine": routes(ids[:7])})
    more = {"x": routes(ids[:8]), "y": routes(ids[:9])}
    b = store(tmp_path / "b", {"two": half, "one": routes(changed(ids)), **more})
    result = run(a, b)
    assert result.exit_code == 0, result.stderr
    assert "2 samples compared; without a partner: 1 of A, 2 of B" in result.stdout
    assert table(result)["2"] == ["150", "6.67%", "1.67%"]
    assert table(result)["all"] == ["150", "3.33%", "1.11%"]


def test_samples_with_other_keys_meet_by_fingerprint(tmp_path: Path, ids: torch.Tensor) -> None:
    a = store(tmp_path / "a", {"step-1": routes(ids), "short": routes(ids[:9], fingerprint=None)})
    b = store(tmp_path / "b", {None: routes(changed(ids)), "other": routes(ids[:9], fingerprint=None)})
    found = compare_paths(a, b)
    assert (found.samples, found.alone_in_a, found.alone_in_b, found.tokens) == (1, 1, 1, TOKENS)
    assert found.whole.differing == 15


def test_samples_of_other_layers_count_where_they_have_them(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    late = routes(ids[:9], layers=(5, 6, 7))
    a = store(tmp_path / "a", {"1": routes(ids), "2": late})
    rows = table(run(a, a))
    assert {layer: row[0] for layer, row in rows.items()} == (
        {"1": "100", "2": "100", "5": "109", "6": "9", "7": "9", "all": "109"}
    )


def test_a_sample_is_nobodys_partner_twice(tmp_path: Path, ids: torch.Tensor) -> None:
    a = store(tmp_path / "a", {"1": routes(ids), "2": routes(ids)})
    b = store(tmp_path / "b", {"3": routes(ids)})
    found = compare_paths(a, b)
    assert (found.samples, found.alone_in_a, found.alone_in_b) == (1, 1, 0)


def test_a_sample_that_lost_its_routes_stops_no_other(tmp_path: Path, ids: torch.Tensor) -> None:
    lost = routes(ids[:9], recorded=torch.zeros(9, dtype=torch.bool))
    a = store(tmp_path / "a", {"1": routes(ids), "2": routes(ids[:9])})
    b = store(tmp_path / "b", {"1": routes(ids), "2": lost})
    found = compare_paths(a, b)
    assert (found.samples, found.rows, found.tokens, found.without_route_in_b) == (2, 109, 100, 9)
    with pytest.raises(InvalidRoutes, match="no token has a route on both sides"):
        compare_paths(store(tmp_path / "c", {"2": lost}), a)


def test_folders_with_nothing_in_common_are_refused(tmp_path: Path, ids: torch.Tensor) -> None:
    a, b = store(tmp_path / "a", {None: routes(ids)}), store(tmp_path / "b", {None: routes(ids[:9])})
    with pytest.raises(ReplayError, match="no sample of one folder is in the other"):
        compare_paths(a, b)


def test_one_key_for_other_tokens_is_an_error_that_names_it(tmp_path: Path, ids: torch.Tensor) -> None:
    a = store(tmp_path / "a", {"prompt-3": routes(ids)})
    b = store(tmp_path / "b", {"prompt-3": routes(ids, fingerprint=7)})
    with pytest.raises(InvalidRoutes, match="prompt-3: these routings are of other sequences"):
        compare_paths(a, b)


# For programs


def test_json_says_the_same(tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor) -> None:
    a, b = saved(tmp_path / "a", routes(ids)), saved(tmp_path / "b", routes(changed(ids)))
    out = tmp_path / "out.json"
    assert run(a, b, "--json", out).exit_code == 0
    said = json.loads(out.read_text())
    assert (said["a"], said["b"], said["samples"], said["tokens"]) == (str(a), str(b), 1, TOKENS)
    assert (said["token_share"], said["expert_share"]) == (15 / 300, 20 / 1200)
    assert [(layer["layer"], layer["differing"]) for layer in said["layers"]] == [(1, 0), (2, 10), (5, 5)]
    assert said["layers"][1] == {
        "layer": 2,
        "token_layers": 100,
        "differing": 10,
        "experts": 400,
        "differing_experts": 10,
        "token_share": 0.1,
        "expert_share": 0.025,
    }


def test_a_file_is_not_overwritten_unasked(
    tmp_path: Path, run: Callable[..., Result], ids: torch.Tensor
) -> None:
    a, out = saved(tmp_path / "a", routes(ids)), tmp_path / "out.json"
    out.write_text("mine")
    assert "--force" in refused(run(a, a, "--json", out))
    assert out.read_text() == "mine"
    assert run(a, a, "--json", out, "--force").exit_code == 0
    assert json.loads(out.read_text())["differing"] == 0


def test_a_small_share_is_not_shown_as_none_nor_a_large_one_as_all() -> None:
    assert [percent(share) for share in (0, 1e-9, 0.0001, 0.5, 1 - 1e-9, 1)] == [
        *("0.00%", "< 0.01%", "0.01%", "50.00%", "> 99.99%", "100.00%")
    ]
    assert Comparison(a="a", b="b", folders=False).whole.token_share == 0
