"""npu-replay compare: files that save wrote and folders of RouteStore, against differences made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Result, invoke
from npu_replay import ReplayError, RoutedExperts, RouteStore, fingerprint
from npu_replay.errors import InvalidRoutes
from npu_replay.inspection.compare import compare_paths

TOKENS = 100
LAYERS = (1, 2, 5)
EXPERTS = 16
TOPK = 4
IDS = torch.rand(TOKENS, len(LAYERS), 12, generator=torch.Generator().manual_seed(7)).topk(TOPK).indices
"""[tokens, layers, topk], from experts 0 to 11: 12 to 15 are there to differ."""

Run = Callable[..., Result]
Put = Callable[[Any], Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: invoke("compare", *arguments)


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write routes into a new file, or samples by their key into a new folder."""
    names: Iterator[Path] = (tmp_path / str(number) for number in count())

    def write(what: RoutedExperts | dict[str | None, RoutedExperts]) -> Path:
        path = next(names)
        if isinstance(what, RoutedExperts):
            what.save(path)
        else:
            with RouteStore.writer(path) as writer:
                for key, sample in what.items():
                    writer.add(sample, key)
        return path

    return write


def routes(ids: torch.Tensor = IDS, **about: Any) -> RoutedExperts:
    known = {"layers": LAYERS, "num_experts": EXPERTS, "fingerprint": fingerprint(list(range(len(ids))))}
    return RoutedExperts(ids=ids, **(known | about))


def others(**about: Any) -> RoutedExperts:
    """Layer 2: one other expert in ten tokens. Layer 5: two in five of them. Everywhere another order."""
    ids = IDS.clone()
    ids[:10, 1, 0] = 12
    ids[:5, 2, 1:3] = torch.tensor([13, 15])
    return routes(ids.flip(dims=[2]), **about)


def table(result: Result) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and (row[0].isdigit() or row[0] == "all")}


def refused(result: Result) -> str:
    """The words of an error, unfolded."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    return " ".join(result.stderr.split())


# Files


@pytest.mark.parametrize(
    ("other", "shares", "last"),
    [
        (routes(IDS.flip(dims=[2])), {}, "the same: every token"),
        (
            others(),
            {"2": ["10.00%", "2.50%"], "5": ["5.00%", "2.50%"], "all": ["5.00%", "1.67%"]},
            "different: 5.00% of token-layers, 1.67% of experts; 10.00% of tokens differ",
        ),
    ],
)
def test_differences_are_counted_by_layer(
    put: Put, run: Run, other: RoutedExperts, shares: dict[str, list[str]], last: str
) -> None:
    result = run(put(routes()), put(other))
    none = ["0.00%", "0.00%"]
    assert table(result) == {row: ["100", *shares.get(row, none)] for row in ("1", "2", "5", "all")}
    assert result.stdout.splitlines()[-1].startswith(last)


def test_rows_without_a_route_are_left_out_and_told_of(put: Put, run: Run) -> None:
    rows = torch.arange(TOKENS)
    a = put(routes(recorded=rows >= 2))
    b = put(others(recorded=rows < 99))
    assert "97 of 100 tokens compared: those with a route on both sides" in run(a, b).stdout
    compared = compare_paths(a, b)
    assert (compared.layers[2][1], compared.layers[5].tolist()) == (8, [97, 3, 97 * TOPK, 6])
    assert compared.differing_tokens == 8


def test_without_a_fingerprint_it_says_what_it_did_not_check(put: Put, run: Run) -> None:
    a = put(routes())
    assert "not checked: that the tokens are the same" in run(a, put(routes(fingerprint=None))).stdout
    assert "not checked" not in run(a, a).stdout


OTHERS: dict[str, tuple[RoutedExperts, list[str]]] = {
    "layers": (
        routes(layers=(1, 2, 6)),
        ["other layers", "Expected layers [1, 2, 5], got layers [1, 2, 6]", "two models"],
    ),
    "experts": (routes(num_experts=32), ["number of experts", "Expected 16, got 32"]),
    "sequence": (routes(fingerprint=7), ["other sequences", "got 0000000000000007", "sampled anew"]),
    "rows": (
        routes(recorded=torch.zeros(TOKENS, dtype=torch.bool)),
        ["nothing in common", "0 common rows"],
    ),
    "tokens": (routes(IDS[:50], fingerprint=None), ["differ in tokens. Expected 100, got 50"]),
    "topk": (routes(IDS[..., :3]), ["differ in top-k. Expected 4, got 3"]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_cannot_be_compared_is_one_line(put: Put, run: Run, what: str) -> None:
    other, words = OTHERS[what]
    a = put(routes())
    b = put(other)
    line = refused(run(a, b))
    assert [word for word in [f"{a} and {b}: ", *words] if word not in line] == [], line


def test_what_is_no_file_of_routes_is_refused(tmp_path: Path, put: Put, run: Run) -> None:
    good = put(routes())
    bad = tmp_path / "bad"
    assert f"{bad}: there is no such file" in refused(run(good, bad))
    bad.write_bytes(b"garbage")
    assert f"{bad}: this file can't be read as routes" in refused(run(bad, good))
    assert "no plain file" in refused(run(good, "/dev/zero"))


# Folders


def test_folders_are_compared_sample_by_sample_and_added_up(put: Put, run: Run) -> None:
    half = routes(IDS[:50])
    a = put({"one": routes(), "two": half, "mine": routes(IDS[:7])})
    result = run(a, put({"two": half, "one": others(), "x": routes(IDS[:8]), "y": routes(IDS[:9])}))
    assert table(result)["2"] == ["150", "6.67%", "1.67%"]
    assert table(result)["all"] == ["150", "3.33%", "1.11%"]
    assert "2 samples compared; without a partner: 1 of A, 2 of B" in result.stdout


def test_samples_with_other_keys_meet_by_fingerprint_and_none_twice(put: Put) -> None:
    short = routes(IDS[:9], fingerprint=None)
    compared = compare_paths(put({"1": routes(), "short": short}), put({None: others(), "other": short}))
    assert (compared.samples, compared.alone_in_a, compared.alone_in_b, compared.tokens) == (1, 1, 1, TOKENS)
    assert compared.whole["differing"] == 15
    compared = compare_paths(put({"1": routes(), "2": routes()}), put({"3": routes()}))
    assert (compared.samples, compared.alone_in_a, compared.alone_in_b) == (1, 1, 0)
    compared = compare_paths(put({"1": routes()}), put({"1": routes(), "2": others()}))  # the key comes first
    assert (compared.samples, compared.alone_in_b, compared.whole["differing"]) == (1, 1, 0)


def test_a_sample_that_lost_its_routes_stops_no_other(put: Put) -> None:
    lost = routes(IDS[:9], recorded=torch.zeros(9, dtype=torch.bool))
    a = put({"1": routes(), "2": routes(IDS[:9])})
    compared = compare_paths(a, put({"1": routes(), "2": lost}))
    assert (compared.samples, compared.rows, compared.tokens) == (2, 109, 100)
    with pytest.raises(InvalidRoutes, match="no token has a route on both sides"):
        compare_paths(put({"2": lost}), a)


def test_folders_with_nothing_in_common_or_one_key_for_other_tokens_are_refused(put: Put) -> None:
    with pytest.raises(ReplayError, match="no sample of one folder is in the other"):
        compare_paths(put({None: routes()}), put({None: routes(IDS[:9])}))
    with pytest.raises(InvalidRoutes, match="prompt-3: these routings are of other sequences"):
        compare_paths(put({"prompt-3": routes()}), put({"prompt-3": routes(fingerprint=7)}))


# For programs


def test_json_says_the_same(put: Put, run: Run) -> None:
    a = put(routes())
    b = put(others())
    report = json.loads(run(a, b, "--json").stdout)
    assert (report["a"], report["b"], report["samples"], report["tokens"]) == (str(a), str(b), 1, TOKENS)
    assert (report["token_share"], report["expert_share"]) == (15 / 300, 20 / 1200)
    assert [(layer["layer"], layer["differing"]) for layer in report["layers"]] == [(1, 0), (2, 10), (5, 5)]
    counts = {"token_layers": 100, "differing": 10, "experts": 400, "differing_experts": 10}
    assert report["layers"][1] == {"layer": 2, "token_share": 0.1, "expert_share": 0.025} | counts
