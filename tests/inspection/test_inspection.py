"""npu-replay inspect: on what a real model routed, put into every form that it reads, whole and broken."""

from __future__ import annotations

import base64
import codecs
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import npu_replay
from npu_replay import ReplayError, RoutedExperts, RouteStore, fingerprint
from npu_replay.cli.commands import app
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes
from npu_replay.inspection import files
from npu_replay.inspection.inspection import Inspection, inspect
from npu_replay.inspection.route_view import STUCK_ROWS, Cell, Tally, View, cells

PROMPT, TOKENS, LAYERS, EXPERTS, TOPK = 90, 120, 8, 32, 4
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


@pytest.fixture(scope="module")
def rollout() -> tuple[list[int], np.ndarray[Any, Any]]:
    """Token ids, and what an engine would say of them: [tokens - 1, layers, topk], layer 0 dense."""
    from npu_replay.demo.rollout import qwen3_moe

    model = qwen3_moe(
        0,
        torch.device("cpu"),
        num_hidden_layers=LAYERS,
        mlp_only_layers=[0],
        max_position_embeddings=TOKENS,
    )
    tokens = torch.arange(TOKENS) * 37 % 512
    with torch.inference_mode(), npu_replay.record(model) as recording:
        model(tokens[None])
    rows = np.zeros((TOKENS - 1, LAYERS, TOPK), np.uint8)
    rows[:, 1:] = recording.routes[0].ids.numpy()[:-1]
    return tokens.tolist(), rows


@pytest.fixture
def tokens(rollout: tuple[list[int], np.ndarray[Any, Any]]) -> list[int]:
    return rollout[0]


@pytest.fixture
def rows(rollout: tuple[list[int], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return rollout[1].copy()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def npy(rows: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return buffer.getvalue()


def choice(rows: np.ndarray[Any, Any] | None, tokens: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_token_ids": tokens[:PROMPT],
        "token_ids": tokens[PROMPT:],
        "routed_experts": None if rows is None else base64.b64encode(npy(rows)).decode(),
    } | changes


def vllm(*choices: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "cmpl-17",
        "choices": list(choices),
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": TOKENS - PROMPT},
    }


def sglang(rows: np.ndarray[Any, Any], tokens: list[int]) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": tokens[PROMPT:],
        "meta_info": {
            "id": "a1",
            "finish_reason": {"type": "length", "length": 30},
            "prompt_tokens": PROMPT,
            "completion_tokens": TOKENS - PROMPT,
            "routed_experts": base64.b64encode(rows.astype("<i4").tobytes()).decode(),
        },
    }


def saved(tmp_path: Path, what: Any, name: str = "answer.json") -> Path:
    path = tmp_path / name
    path.write_bytes(what if isinstance(what, bytes) else json.dumps(what).encode())
    return path


def routes_of(rows: np.ndarray[Any, Any], tokens: list[int]) -> RoutedExperts:
    return RoutedExperts(
        ids=np.concatenate([rows, rows[:1] * 0])[:, 1:],
        layers=range(1, LAYERS),
        num_experts=EXPERTS,
        recorded=np.arange(len(tokens)) < len(tokens) - 1,
        fingerprint=fingerprint(tokens),
        weight_version="step 3",
    )


def wrong(found: Inspection) -> dict[int, dict[str, int]]:
    """By layer, what is marked in it, where anything is."""
    return {layer.layer: layer.wrong for layer in found.layers if layer.wrong}


def zeros(rows: np.ndarray[Any, Any]) -> None:
    rows[:] = 0


def half_captured(rows: np.ndarray[Any, Any]) -> None:
    rows[:45] = 0


def shifted(rows: np.ndarray[Any, Any]) -> None:
    rows[:] = np.roll(rows, 1, axis=1)


def constant(rows: np.ndarray[Any, Any]) -> None:
    rows[:, 3] = rows[0, 3]


def stale(rows: np.ndarray[Any, Any]) -> None:
    rows[64:72] = rows[32:40]


def named_twice(rows: np.ndarray[Any, Any]) -> None:
    rows[10:13, 2, 0] = rows[10:13, 2, 1]


def outside(rows: np.ndarray[Any, Any]) -> None:
    rows[7, 4, 2] = EXPERTS


EACH = tuple(range(1, LAYERS))
FAULTS: tuple[tuple[Callable[[Any], None], dict[int, dict[str, int]]], ...] = (
    (zeros, {layer: {"zeros": 119} for layer in EACH}),
    (half_captured, {layer: {"zeros": 45} for layer in EACH}),
    (shifted, {0: {"shifted": 119}, 1: {"zeros": 119}}),
    (constant, {3: {"stuck": 119}}),
    (stale, {layer: {"copy": 8} for layer in EACH}),
    (named_twice, {2: {"twice": 3}}),
    (outside, {4: {"outside": 1}}),
)
BY_NAME = pytest.mark.parametrize(("fault", "marks"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])


# vLLM's answers


def test_a_good_answer(
    tmp_path: Path, config: Path, run: Callable[..., Result], rows: Any, tokens: list[int]
) -> None:
    path = saved(tmp_path, vllm(choice(rows, tokens)))
    result = run(path, "--config", config, "--engine-version", "0.23.0")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{path}: an answer of vLLM 0.23.0"
    assert lines[1] == "120 tokens, 119 rows; top-4 of 32 experts in 7 layers; uint8, 3,808 bytes"
    assert f"{fingerprint(tokens):#018x}" in lines[2]
    assert [line.split()[0] for line in lines if line[:1].isdigit()][1:] == list("1234567")
    assert lines[-1] == "ok"


def test_the_figures_are_those_of_the_ids(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    found = inspect(saved(tmp_path, vllm(choice(rows, tokens))), config=config)
    assert [layer.layer for layer in found.layers] == list(EACH)
    for layer in found.layers:
        named = rows[:, layer.layer].ravel().tolist()
        counts = {expert: named.count(expert) for expert in set(named)}
        shares = [count / len(named) for count in counts.values()]
        assert layer.rows == 119
        assert layer.used == len(counts)
        assert counts[layer.busiest] == max(counts.values())
        assert layer.busiest_share == pytest.approx(max(shares))
        assert layer.entropy == pytest.approx(-sum(share * math.log2(share) for share in shares))
        same = (rows[1:, layer.layer] == rows[:-1, layer.layer]).all(axis=1)
        assert layer.repeated == same.sum()


@BY_NAME
def test_a_broken_answer_is_refused_as_from_vllm_does_and_shows_where(
    tmp_path: Path,
    config: Path,
    run: Callable[..., Result],
    rows: Any,
    tokens: list[int],
    fault: Callable[[Any], None],
    marks: dict[int, dict[str, int]],
) -> None:
    fault(rows)
    answer = vllm(choice(rows, tokens))
    with pytest.raises(InvalidRoutes) as caught:
        from_vllm(answer, CONFIG, version="0.23.0")
    path = saved(tmp_path, answer)
    result = run(path, "--config", config, "--engine-version", "0.23.0")
    assert result.exit_code == 1
    message = str(caught.value).removeprefix("[npu_replay] ")
    assert f"refused: {message}" in " ".join(result.stdout.split())
    assert wrong(inspect(path, config=config)) == marks
    for what in marks.values():
        for word, count in what.items():
            assert f"{word} {count}" in result.stdout


@BY_NAME
def test_a_bare_array_without_its_config_shows_the_same(
    tmp_path: Path,
    rows: Any,
    tokens: list[int],
    fault: Callable[[Any], None],
    marks: dict[int, dict[str, int]],
) -> None:
    """Except for what takes a config or the tokens: then it says that it couldn't look."""
    fault(rows)
    found = inspect(saved(tmp_path, npy(rows), "rows.npy"))
    assert any("--config" in what for what in found.unchecked)
    assert any("--prompt-ids" in what for what in found.unchecked)
    assert found.good == (fault in (shifted, stale, outside))
    if fault not in (shifted, outside, zeros):  # with no config, zeros may be layer 0's too
        assert wrong(found) == marks


def test_rows_that_lack_are_seen(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    found = inspect(saved(tmp_path, vllm(choice(rows[:70], tokens))), config=config)
    assert "fewer tokens than it ran" in found.bad[0].problem
    assert found.strip is not None
    assert found.strip.cells.shape == (119, LAYERS)
    assert (found.strip.cells[70:, 1:] == Cell.NO_ROUTE).all()
    assert (found.strip.cells[:70, 1:] == Cell.GOOD).all()


def test_a_choice_without_routes(tmp_path: Path, config: Path, tokens: list[int]) -> None:
    path = saved(tmp_path, vllm(choice(None, tokens)))
    found = inspect(path, config=config, version="0.23.0")
    assert "no routes" in found.bad[0].problem
    assert "enable_return_routed_experts" in found.bad[0].problem
    assert found.strip is None
    assert "no routes" in inspect(path).bad[0].problem


def test_each_completion_is_judged_and_named_by_its_own_number(
    tmp_path: Path, config: Path, run: Callable[..., Result], rows: Any, tokens: list[int]
) -> None:
    bad = rows.copy()
    half_captured(bad)
    good = choice(rows, tokens)
    path = saved(tmp_path, vllm(good, good, choice(bad, tokens), good))
    found = inspect(path, config=config)
    assert [bool(verdict.problem) for verdict in found.verdicts] == [False, False, True, False]
    assert "completion 2, choices[2].routed_experts: 45 of 119 rows" in found.bad[0].problem
    assert found.strip is not None
    assert (found.strip.cells[2, 1:] == Cell.ZEROS).all()
    text = run(path, "--config", config).stdout
    assert "4 sequences, 480 tokens" in text
    assert "refused: 1 of 4 sequences" in text
    assert inspect(path, config=config, sample="1").good
    assert not inspect(path, config=config, sample="completion 2").good
    with pytest.raises(ReplayError, match="no such sequence"):
        inspect(path, config=config, sample="4")


def test_choices_in_another_order_are_judged_under_the_engines_numbers(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    """Each alone, so the usage of both together says nothing of one."""
    bad = rows.copy()
    half_captured(bad)
    answer = vllm(choice(bad, tokens, index=1), choice(rows, tokens))
    answer["usage"]["completion_tokens"] *= 2
    path = saved(tmp_path, answer)
    found = inspect(path, config=config)
    assert [bool(verdict.problem) for verdict in found.verdicts] == [False, True]
    assert "completion 1, choices[1].routed_experts: 45 of 119 rows" in found.bad[0].problem
    assert inspect(path, config=config, sample="0").good


def test_an_answer_that_only_counts_its_tokens_is_checked_by_the_count(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    bare = choice(rows, tokens)
    del bare["token_ids"]
    found = inspect(saved(tmp_path, vllm(bare)), config=config)
    assert found.good
    assert "doesn't name them" in found.unchecked[0]
    assert found.verdicts[0].facts == ()  # no fingerprint of tokens that nobody named
    short = inspect(
        saved(tmp_path, vllm(bare | {"routed_experts": choice(rows[:-2], tokens)["routed_experts"]})),
        config=config,
    )
    assert "fewer tokens" in short.bad[0].problem


def test_the_prompts_rows_apart_as_vllm_0_21_has_them(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    apart = vllm(choice(None, tokens, routed_experts=rows[PROMPT:, 1:].tolist()))
    apart["prompt_routed_experts"] = rows[:PROMPT, 1:].tolist()
    found = inspect(saved(tmp_path, apart), config=config)
    assert found.good
    assert [layer.rows for layer in found.layers] == [119] * 7
    assert inspect(saved(tmp_path, apart)).verdicts[0].rows == 119


def test_prompts_rows_apart_are_the_first_prompts(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    """vLLM 0.21 answers several prompts at once with the rows of the first: the same length shows nothing."""
    one = choice(None, tokens, routed_experts=rows[PROMPT:, 1:].tolist())
    other = one | {"index": 1, "prompt_token_ids": [token + 1 for token in tokens[:PROMPT]]}
    apart = vllm(one, one, other) | {"prompt_routed_experts": rows[:PROMPT, 1:].tolist()}
    found = inspect(saved(tmp_path, apart), config=config, version="0.21.0")
    assert [bool(verdict.problem) for verdict in found.verdicts] == [False, False, True]
    assert "completion 2" in found.bad[0].problem
    assert "several prompts" in found.bad[0].problem


def test_headers_before_the_body_are_skipped(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    whole = head + json.dumps(vllm(choice(rows, tokens))).encode()
    assert inspect(saved(tmp_path, whole), config=config).good


# SGLang's answers


def test_an_answer_of_sglang(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    path = saved(tmp_path, sglang(rows, tokens))
    prompt = saved(tmp_path, tokens[:PROMPT], "prompt.json")
    found = inspect(path, config=config, prompt_ids=prompt)
    assert found.good
    assert found.what == "an answer of SGLang (release not given)"
    assert found.unchecked == ()
    counted = inspect(path, config=config)
    assert counted.good
    assert "doesn't name them" in counted.unchecked[0]
    assert "--config" in inspect(path).bad[0].problem


@BY_NAME
def test_a_broken_answer_of_sglang(
    tmp_path: Path,
    config: Path,
    rows: Any,
    tokens: list[int],
    fault: Callable[[Any], None],
    marks: dict[int, dict[str, int]],
) -> None:
    fault(rows)
    path = saved(tmp_path, [sglang(rows, tokens)])
    prompt = saved(tmp_path, tokens[:PROMPT], "prompt.json")
    found = inspect(path, config=config, version="0.5.12", prompt_ids=prompt)
    assert found.bad[0].problem.startswith("SGLang 0.5.12, request a1")
    assert "Usual cause" in found.bad[0].problem
    assert wrong(found) == marks


def test_engine_decides_where_the_answer_does_not(tmp_path: Path, config: Path, tokens: list[int]) -> None:
    answer = {"id": "x", "choices": [{"index": 0, "text": "", "token_ids": [1], "prompt_token_ids": [2]}]}
    path = saved(tmp_path, answer)
    assert "can't be told" in inspect(path, config=config).bad[0].problem
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        assert name in inspect(path, config=config, engine=engine).bad[0].problem  # type: ignore[arg-type]


# Arrays, files, folders


def test_an_array_with_its_tokens(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    ids = {
        "prompt_ids": saved(tmp_path, tokens[:PROMPT], "prompt.json"),
        "output_ids": saved(tmp_path, tokens[PROMPT:], "output.json"),
    }
    path = saved(tmp_path, npy(rows.astype(np.int32)), "rows.npy")
    found = inspect(path, config=config, **ids)
    assert found.good
    assert found.unchecked == ()
    stale(rows)
    found = inspect(saved(tmp_path, npy(rows), "rows.npy"), config=config, engine="vllm", **ids)
    assert "another token's" in found.bad[0].problem
    assert "Usual cause" in found.bad[0].problem
    with pytest.raises(ReplayError, match="only --prompt-ids"):
        inspect(path, config=config, prompt_ids=ids["prompt_ids"])


@pytest.mark.parametrize("form", ["npy", "lists", "bytes", "file"])
def test_a_sample_of_a_file_that_holds_one_sequence_is_refused(
    tmp_path: Path, rows: Any, tokens: list[int], form: str
) -> None:
    """Else a number that is meant for another file would be left aside in silence."""
    path = saved(tmp_path, {"npy": npy(rows), "lists": rows.tolist()}.get(form, b""), "one")
    if form == "bytes":
        path.write_bytes(routes_of(rows, tokens).to_bytes())
    elif form == "file":
        routes_of(rows, tokens).save(path, overwrite=True)
    assert inspect(path).verdicts
    with pytest.raises(ReplayError, match=r"one sequence in this file.*--sample 3"):
        inspect(path, sample="3")


def test_an_array_without_rows_is_refused(tmp_path: Path, rows: Any) -> None:
    assert "no rows" in inspect(saved(tmp_path, npy(rows[:0]), "rows.npy")).bad[0].problem
    assert not inspect(saved(tmp_path, npy(rows[..., :0]), "rows.npy")).good


@pytest.mark.parametrize("looping", [False, True])
def test_copies_are_no_fault_where_the_tokens_are_not_known(
    tmp_path: Path, config: Path, rows: Any, looping: bool
) -> None:
    """A model that says one thing again and again may route it alike; 8 copies may be 8 times one token."""
    if looping:
        rows[60:] = rows[59]
    else:
        stale(rows)
    found = inspect(saved(tmp_path, npy(rows), "rows.npy"), config=config)
    assert found.good
    assert all("copy" in layer.wrong or "stuck" in layer.wrong for layer in found.layers)
    rows[:] = rows[59]
    assert not inspect(saved(tmp_path, npy(rows), "rows.npy"), config=config).good


def test_a_count_of_tokens_takes_no_memory(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    bare = vllm(choice(rows, tokens))
    del bare["choices"][0]["token_ids"]
    bare["usage"]["completion_tokens"] = 10**12
    found = inspect(saved(tmp_path, bare), config=config)
    assert found.good  # by what is there: such a count is none
    assert any("--prompt-ids" in what for what in found.unchecked)


def test_rows_from_a_start_on(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    ids = {
        "prompt_ids": saved(tmp_path, tokens[:PROMPT], "prompt.json"),
        "output_ids": saved(tmp_path, tokens[PROMPT:], "output.json"),
    }
    path = saved(tmp_path, npy(rows[50:]), "rows.npy")
    assert inspect(path, config=config, start=50, **ids).good
    assert "fewer" in inspect(path, config=config, **ids).bad[0].problem


def test_an_array_in_another_shape_is_refused(tmp_path: Path, config: Path, rows: Any) -> None:
    path = saved(tmp_path, npy(rows.reshape(119, -1)), "rows.npy")
    for with_config in (config, None):
        assert "[tokens, layers, topk]" in inspect(path, config=with_config).bad[0].problem


def test_routes_of_ours(tmp_path: Path, config: Path, rows: Any, tokens: list[int]) -> None:
    routes = routes_of(rows, tokens)
    routes.save(tmp_path / "routes.safetensors")
    ids = saved(tmp_path, tokens, "all.json"), saved(tmp_path, [], "none.json")
    for path in (tmp_path / "routes.safetensors", saved(tmp_path, routes.to_bytes(), "routes.bin")):
        found = inspect(path, config=config, prompt_ids=ids[0], output_ids=ids[1])
        assert found.good
        assert found.unchecked == ()
        assert "weights step 3" in found.verdicts[0].facts
        assert [layer.rows for layer in found.layers] == [119] * 7
        assert inspect(path).good
        other = inspect(path, config=config, prompt_ids=ids[0], output_ids=ids[0])
        assert "another number of tokens" in other.bad[0].problem


def test_routes_of_other_tokens_or_another_model(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int]
) -> None:
    path = saved(tmp_path, routes_of(rows, tokens).to_bytes(), "routes.bin")
    ids = saved(tmp_path, [*tokens[:-1], 511], "all.json"), saved(tmp_path, [], "none.json")
    found = inspect(path, config=config, prompt_ids=ids[0], output_ids=ids[1])
    assert "other tokens" in found.bad[0].problem
    config.write_text(json.dumps(CONFIG | {"num_experts": 64}))
    assert "another model" in inspect(path, config=config).bad[0].problem


@pytest.mark.parametrize("kind", ["changed", "cut"])
def test_damaged_routes_are_refused_and_shown(
    tmp_path: Path, rows: Any, tokens: list[int], kind: str
) -> None:
    data = bytearray(routes_of(rows, tokens).to_bytes())
    if kind == "cut":
        del data[-500:]
    else:
        data[-100] ^= 1
    found = inspect(saved(tmp_path, bytes(data), "routes.bin"))
    assert kind.replace("cut", "incomplete") in found.bad[0].problem
    assert len(found.layers) == 7
    assert found.layers[0].rows == (119 if kind == "changed" else 102)


def test_a_damaged_file_is_refused_and_shown(tmp_path: Path, rows: Any, tokens: list[int]) -> None:
    routes_of(rows, tokens).save(tmp_path / "routes.safetensors")
    data = bytearray((tmp_path / "routes.safetensors").read_bytes())
    data[-500] ^= 1
    found = inspect(saved(tmp_path, bytes(data), "routes.safetensors"))
    assert "changed after they were written" in found.bad[0].problem
    assert found.layers[0].rows == 119


@pytest.fixture
def store(tmp_path: Path, rows: Any, tokens: list[int]) -> Path:
    folder = tmp_path / "store"
    with RouteStore.writer(folder, shard_bytes=1) as writer:
        for number in range(4):
            writer.add(routes_of(rows[: 80 + number], tokens[: 81 + number]), key=f"sample-{number}")
    return folder


def test_a_folder_of_many(store: Path, run: Callable[..., Result]) -> None:
    result = run(store)
    assert result.exit_code == 0
    assert "4 samples" in result.stdout
    assert "4 sequences, 330 tokens" in result.stdout
    assert "ok (4 sequences), as far as it could be checked" in result.stdout
    assert inspect(store, sample="sample-2").layers[0].rows == 82


def test_a_folder_with_a_bad_sample(store: Path, run: Callable[..., Result]) -> None:
    shard = store / "routes-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-200] ^= 1
    shard.write_bytes(data)
    result = run(store)
    assert result.exit_code == 1
    assert "refused: 1 of 4 sequences" in result.stdout
    assert "- sample-1: " in result.stdout
    assert "changed after they were written" in result.stdout
    one = inspect(store, sample="sample-1")
    assert not one.good
    assert one.layers[0].rows == 81  # still to be seen
    strip = inspect(store).strip
    assert strip is not None
    assert (strip.cells == Cell.REFUSED).any(axis=1).tolist() == [False, True, False, False]


def test_a_key_that_is_not_there_and_a_shard_alone(store: Path, run: Callable[..., Result]) -> None:
    result = run(store, "--sample", "sample-9")
    assert result.exit_code == 1
    assert "no such sample" in result.stderr
    assert "its folder" in inspect(store / "routes-00000.safetensors").bad[0].problem
    assert "no routes in this folder" in inspect(store.parent).bad[0].problem


# What is no data at all


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x00\x01garbage\xff" * 40, "nobody knows"),
        (b"hello", "nobody knows"),
        (b'data: {"choices": []}\n\n', "stream=false"),
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"answer": 42}', "can't be told"),
        (b"[]", "can't be told"),
        (b"[[1, 2]]", "nested lists"),
        (b"[" * 100_000, "nobody knows"),
        (b'{"choices": [{"routed_experts": "%%%"}]}', "base64"),
        (b'{"choices": [{"routed_experts": 7}]}', "base64"),
        (b'{"choices": "x", "meta_info": 3}', "vLLM or SGLang|SGLang"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "npy|integers"),
        (b"NPUROUT1\xff\xff\xff\xff", "header"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{" + b" " * 40, "can't be read"),
    ],
)
def test_foreign_data_is_one_message(
    tmp_path: Path, run: Callable[..., Result], config: Path, data: bytes, words: str
) -> None:
    path = saved(tmp_path, data, "data")
    result = run(path, "--config", config)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    (problem,) = [verdict.problem for verdict in inspect(path, config=config).verdicts]
    assert any(word in problem for word in words.split("|")), problem


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "loaded"),)

    path = tmp_path / "trap.npy"
    np.save(path, np.array([Trap()], object), allow_pickle=True)
    assert not inspect(path).good
    assert not (tmp_path / "loaded").exists()


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, b"{", "large.json")
    os.truncate(path, files.MOST_TEXT + 1)  # sparse: it takes no room
    assert "too large" in inspect(path).bad[0].problem
    monkeypatch.setattr(files, "MOST_TEXT", 10)
    with pytest.raises(ReplayError, match="too large"):
        inspect(path, prompt_ids=saved(tmp_path, list(range(100)), "ids.json"))
    path = saved(tmp_path, npy(np.ones((3, 2, 2), np.uint8)), "large.npy")
    os.truncate(path, files.MOST_BYTES + 1)
    assert "too large" in inspect(path).bad[0].problem


def test_no_file_no_device(tmp_path: Path, run: Callable[..., Result]) -> None:
    result = run(tmp_path / "nothing")
    assert result.exit_code == 1
    assert result.stdout.strip() == f"refused: {tmp_path / 'nothing'}: there is no such file"
    assert "no plain file" in inspect(Path("/dev/zero")).bad[0].problem


@pytest.mark.parametrize("text", ["", "{}", '["a"]', "[1.5]", "[[1], [[2]]]", "[99999999999999999999]"])
def test_ids_that_are_none(tmp_path: Path, rows: Any, text: str) -> None:
    path = saved(tmp_path, npy(rows), "rows.npy")
    with pytest.raises(ReplayError, match=r"token ids|empty"):
        inspect(path, prompt_ids=saved(tmp_path, text.encode(), "ids.json"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_never_crashes_it_and_what_it_lets_through_from_vllm_takes(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int], data: st.DataObject
) -> None:
    answer = vllm(choice(rows, tokens))
    kinds = [
        json.dumps(answer).encode(),
        json.dumps(sglang(rows, tokens)).encode(),
        npy(rows),
        routes_of(rows, tokens).to_bytes(),
    ]
    whole = bytearray(data.draw(st.sampled_from(kinds)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = saved(tmp_path, bytes(whole), "damaged")
    for with_config in (config, None):
        found = inspect(path, config=with_config)
        found.to_json()
        if found.good and with_config and "vLLM" in found.what and not found.unchecked:
            assert len(from_vllm(bytes(whole), CONFIG)) == len(found.verdicts)


@pytest.mark.parametrize("before", [b"\xbb", b"\xef", b"\xbf\xbb"])
def test_a_piece_of_a_byte_order_mark_is_damage(
    tmp_path: Path, config: Path, rows: Any, tokens: list[int], before: bytes
) -> None:
    """from_vllm can't read it either; the whole mark it can."""
    answer = json.dumps(vllm(choice(rows, tokens))).encode()
    assert inspect(saved(tmp_path, codecs.BOM_UTF8 + answer, "marked"), config=config).good
    assert len(from_vllm(codecs.BOM_UTF8 + answer, CONFIG)) == 1
    assert not inspect(saved(tmp_path, before + answer, "damaged"), config=config).good


# For programs, and the picture


def test_json(tmp_path: Path, config: Path, run: Callable[..., Result], rows: Any, tokens: list[int]) -> None:
    named_twice(rows)
    result = run(saved(tmp_path, vllm(choice(rows, tokens))), "--config", config, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["ok"] is False
    assert said["num_experts"] == EXPERTS
    assert "name an expert twice" in said["sequences"][0]["problem"]
    assert said["sequences"][0]["rows"] == 119
    assert [layer["wrong"] for layer in said["layers"]] == [{}, {"twice": 3}, *[{}] * 5]
    missing = run(tmp_path / "nothing", "--json")
    assert missing.exit_code == 1
    assert "no such file" in json.loads(missing.stdout)["sequences"][0]["problem"]


def pixels(path: Path) -> set[str]:
    """The colours of a picture."""
    from matplotlib import image

    found = np.unique((image.imread(path)[..., :3] * 255).round().astype(np.uint8).reshape(-1, 3), axis=0)
    return {f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in found.tolist()}


@BY_NAME
def test_the_picture_shows_what_is_wrong(
    tmp_path: Path,
    config: Path,
    run: Callable[..., Result],
    rows: Any,
    tokens: list[int],
    fault: Callable[[Any], None],
    marks: dict[int, dict[str, int]],
) -> None:
    from npu_replay.inspection import plots

    colours = {
        Cell[word.upper()]: plots._CELLS[Cell[word.upper()]] for what in marks.values() for word in what
    }
    out = tmp_path / "picture.png"
    path = saved(tmp_path, vllm(choice(rows, tokens)))
    assert run(path, "--config", config, "--out", out).exit_code == 0
    good = pixels(out)
    assert plots._CELLS[Cell.GOOD] in good
    assert not set(colours.values()) & good - set(plots._LOAD)
    fault(rows)
    saved(tmp_path, vllm(choice(rows, tokens)))
    assert run(path, "--config", config, "--out", out, "--force").exit_code == 1
    assert set(colours.values()) <= pixels(out)


def test_a_picture_is_not_overwritten_unasked(tmp_path: Path, run: Callable[..., Result], rows: Any) -> None:
    out = saved(tmp_path, b"mine", "picture.png")
    path = saved(tmp_path, npy(rows), "rows.npy")
    result = run(path, "--out", out)
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert result.stdout == ""  # before the work, not after it
    assert out.read_bytes() == b"mine"
    assert run(path, "--out", out, "--force").exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing(tmp_path: Path, run: Callable[..., Result]) -> None:
    out = tmp_path / "picture.png"
    assert run(saved(tmp_path, b"garbage", "garbage"), "--out", out).exit_code == 1
    assert out.read_bytes().startswith(b"\x89PNG")


# What a row shows in a layer


def view(ids: np.ndarray[Any, Any], **changes: Any) -> View:
    return View(**({"ids": ids, "layers": tuple(range(ids.shape[1])), "num_experts": 16} | changes))


def scattered(rows: int, columns: int = 3, topk: int = 2) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(5)
    return np.argsort(generator.random((rows, columns, 16)), axis=2)[..., :topk]


def test_stuck_takes_so_many_rows_on_end() -> None:
    ids = scattered(60)
    ids[5 : 5 + STUCK_ROWS, 1] = [3, 9]
    ids[40 : 40 + STUCK_ROWS - 1, 2] = [3, 9]
    ids[[4, 5 + STUCK_ROWS], 1] = ids[[39, 40 + STUCK_ROWS - 1], 2] = [1, 2]
    found = cells(view(ids)) == Cell.STUCK
    assert np.flatnonzero(found[:, 1]).tolist() == list(range(5, 5 + STUCK_ROWS))
    assert not found[:, [0, 2]].any()


def test_a_whole_column_may_be_stuck() -> None:
    ids = scattered(STUCK_ROWS)
    ids[:, 0] = [3, 9]
    assert (cells(view(ids))[:, 0] == Cell.STUCK).all()


def test_copies_of_the_same_token_are_none() -> None:
    ids = scattered(30, columns=20)
    ids[20] = ids[10]
    tokens = np.arange(30)
    assert (cells(view(ids, tokens=tokens)) == Cell.COPY).all(axis=1).nonzero()[0].tolist() == [20]
    tokens[20] = tokens[10]
    assert not (cells(view(ids, tokens=tokens)) == Cell.COPY).any()


def test_with_a_topk_of_1_zero_is_an_expert() -> None:
    ids = scattered(30, topk=1)
    ids[7] = 0
    assert cells(view(ids))[7].tolist() == [Cell.GOOD] * 3


def test_rows_without_a_route_are_neither_loaded_nor_wrong() -> None:
    ids = scattered(30, topk=4)
    ids[20:] = ids[:, 2] = 0
    ids[25:, 2] = 3  # whatever is in them, in a dense layer too
    tally = Tally()
    tally.add(view(ids, recorded=np.arange(30) < 20, dense=frozenset({2})))
    assert [(layer.layer, layer.rows, layer.wrong) for layer in tally.figures()] == [(0, 20, {}), (1, 20, {})]
    assert tally.load[0].sum() == 80


def test_views_of_other_layers_and_sizes_add_up() -> None:
    tally = Tally()
    tally.add(view(scattered(30), layers=(0, 1, 2)))
    tally.add(view(scattered(10), layers=(2, 3, 4), num_experts=32))
    assert [(layer.layer, layer.rows) for layer in tally.figures()] == [
        (0, 30),
        (1, 30),
        (2, 40),
        (3, 10),
        (4, 10),
    ]
    assert [len(tally.load[layer]) for layer in range(5)] == [16, 16, 32, 32, 32]


def test_one_bad_row_of_thousands_is_drawn() -> None:
    from npu_replay.inspection.plots import _WIDEST, _narrowed

    found = np.full((10_007, 3), Cell.GOOD, np.uint8)
    found[5000, 1] = Cell.ZEROS  # not one that is the first of its neighbours
    drawn = _narrowed(found)
    assert drawn.shape == (_WIDEST, 3)
    assert (drawn == Cell.ZEROS).sum(axis=0).tolist() == [0, 1, 0]
    assert drawn[_WIDEST // 2 - 1 : _WIDEST // 2 + 2, 1].max() == Cell.ZEROS


def test_many_layers_are_put_together_where_they_look_alike(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    ids = scattered(100, columns=40, topk=4)
    ids[:, 17:19] = 0
    result = run(saved(tmp_path, npy(ids.astype(np.uint8)), "rows.npy"))
    assert "0 to 39" in result.stdout
    ids[:30, 17:19] = scattered(30, columns=2, topk=4)
    result = run(saved(tmp_path, npy(ids.astype(np.uint8)), "rows.npy"))
    starts = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert [start for start in ("0 to 16", "17 to 18", "19 to 39") if start in starts] == [
        "0 to 16",
        "17 to 18",
        "19 to 39",
    ]


def test_a_key_that_stands_twice_in_an_answer_is_refused(tmp_path: Path) -> None:
    found = inspect(saved(tmp_path, b'{"choices": [], "choices": [], "usage": null}', "answer.json"))
    assert "'choices' stands twice" in found.bad[0].problem
