"""npu-replay inspect: on one sample's routes, put into every form that it reads, whole and broken."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglang_outputs
import vllm_outputs
from command_line import Result, invoke
from npu_replay import ReplayError, RoutedExperts, RoutedModel, RouteStore, fingerprint
from npu_replay.inspection.findings import Inspection
from npu_replay.inspection.inspection import inspect
from npu_replay.routes.checks import Array
from vllm_outputs import engine_rows, expected, npy, sampled

PROMPT = 90
TOKENS = 120
LAYERS = 8
EXPERTS = 32
TOPK = 4
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


MODEL = RoutedModel(layers=tuple(range(1, LAYERS)), num_layers=LAYERS, num_experts=EXPERTS, topk=TOPK)
SAMPLE = sampled(MODEL, PROMPT, TOKENS - PROMPT)
ROUTES = expected(MODEL, SAMPLE).with_known(weight_version="step 3")


@dataclass
class Desk:
    """A folder, a model's config in it, and the rows of SAMPLE that an engine has."""

    folder: Path
    rows: Array

    def put(self, what: Any, name: str = "data") -> Path:
        """Into a file: bytes, routes, an array as .npy, or anything else as JSON."""
        path = self.folder / name
        if isinstance(what, RoutedExperts):
            what.save(path, overwrite=True)
        elif isinstance(what, np.ndarray):
            path.write_bytes(base64.b64decode(npy(what)))
        else:
            path.write_bytes(what if isinstance(what, bytes) else json.dumps(what).encode())
        return path

    @property
    def config(self) -> Path:
        return self.put(CONFIG, "config.json")

    def look(self, what: Any, **how: Any) -> Inspection:
        """With the model's config, unless told otherwise."""
        return inspect(self.put(what), **({"config": self.config} | how))

    def refusal(self, what: Any, **how: Any) -> str:
        """Why the only sequence is refused."""
        (verdict,) = self.look(what, **how).bad
        return verdict.problem

    @property
    def ids(self) -> dict[str, Path]:
        """What prompt and output are, in two files."""
        return {
            "prompt_ids": self.put(SAMPLE.prompt, "prompt.json"),
            "output_ids": self.put(SAMPLE.output, "output.json"),
        }

    def answer(self, *rows: Array | None) -> dict[str, Any]:
        """vLLM's, with a choice for each of these rows; of those as they are now, where none are given."""
        rows = rows or (self.rows,)
        answer = vllm_outputs.answer("0.33.0", MODEL, *[SAMPLE] * len(rows))
        for choice, some in zip(answer["choices"], rows, strict=True):
            choice["routed_experts"] = None if some is None else npy(some)
        return answer

    def counted(self) -> dict[str, Any]:
        """vLLM's, that only counts its tokens."""
        answer = self.answer()
        del answer["choices"][0]["token_ids"]
        return answer

    def sglang(self) -> dict[str, Any]:
        return sglang_outputs.Request("0.5.23", SAMPLE.prompt, SAMPLE.output, self.rows).generate()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, engine_rows("0.33.0", MODEL, SAMPLE))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: invoke("inspect", *arguments)


def stale(rows: Array) -> None:
    rows[64:72] = rows[32:40]


def named_twice(rows: Array) -> None:
    rows[10:13, 2, 0] = rows[10:13, 2, 1]


def half_captured(rows: Array) -> None:
    rows[:45] = 0


def shifted(rows: Array) -> None:
    rows[:] = np.roll(rows, 1, axis=1)


EACH = tuple(range(1, LAYERS))

# vLLM's answers


def test_a_good_answer(desk: Desk, run: Callable[..., Result]) -> None:
    path = desk.put(desk.answer())
    result = run(path, "--config", desk.config, "--engine-version", "0.23.0")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{path}: an answer of vLLM 0.23.0"
    assert lines[1] == "120 tokens, 119 with a route; top-4 of 32 experts in 7 layers"
    assert f"{fingerprint(SAMPLE.tokens):#018x}" in lines[2]
    heading = "Experts used Busiest Entropy, bits Layer Rows of 32 even: 3.12% of 5.00"
    assert " ".join(lines[4:6]).split() == heading.split()
    assert [line.split()[0] for line in lines if line[:1].isdigit()][1:] == list("1234567")
    assert lines[-1] == "ok"


def test_the_figures_are_those_of_the_ids(desk: Desk) -> None:
    report = desk.look(desk.answer())
    assert [layer["layer"] for layer in report.layers] == list(EACH)
    for layer in report.layers:
        named = desk.rows[:, layer["layer"]].ravel().tolist()
        counts = {expert: named.count(expert) for expert in set(named)}
        shares = [count / len(named) for count in counts.values()]
        assert (layer["rows"], layer["used"]) == (119, len(counts))
        assert counts[layer["busiest"]] == max(counts.values())
        assert layer["busiest_share"] == pytest.approx(max(shares))
        assert layer["entropy"] == pytest.approx(-sum(share * math.log2(share) for share in shares))


REFUSED: dict[str, Callable[[Desk], Any]] = {
    "fewer tokens than it ran": lambda desk: desk.answer(desk.rows[:70]),
    "no routes.*enable_return_routed_experts": lambda desk: desk.answer(None),
    "fewer tokens": lambda desk: replace(desk, rows=desk.rows[:-2]).counted(),
    "hasn't got the sampled token ids": lambda desk: desk.counted() | {"usage": None},
    r"\[tokens, layers, topk\]": lambda desk: desk.rows.reshape(119, -1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_lacks_something_is_refused(desk: Desk, words: str) -> None:
    assert re.search(words, desk.refusal(REFUSED[words](desk)))
    with pytest.raises(ReplayError, match=r"--config, the model's config.json"):
        desk.look(REFUSED[words](desk), config=None)


def test_each_completion_is_judged_and_named_by_its_own_number(
    desk: Desk, run: Callable[..., Result]
) -> None:
    good = desk.rows.copy()
    half_captured(desk.rows)
    answer = desk.answer(good, good, desk.rows, good)
    report = desk.look(answer)
    assert [verdict.name for verdict in report.verdicts] == [f"completion {number}" for number in range(4)]
    assert report.bad == [report.verdicts[2]]
    assert "completion 2, choices[2].routed_experts: 45 of 119 rows" in report.bad[0].problem
    assert [layer["rows"] for layer in report.layers] == [3 * 119] * 7
    text = run(desk.put(answer), "--config", desk.config).stdout
    assert "3 sequences, 360 tokens" in text
    assert "refused: 1 of 4 sequences" in text
    assert desk.look(answer, sample="1").good
    assert not desk.look(answer, sample="completion 2").good
    with pytest.raises(ReplayError, match="no such sequence"):
        desk.look(answer, sample="4")
    with pytest.raises(ReplayError, match="these aren't token ids"):
        desk.look(answer, prompt_ids=desk.put([SAMPLE.prompt] * 4, "lists.json"))


def test_the_rows_of_an_answer_may_begin_at_a_later_token(desk: Desk) -> None:
    answer = desk.answer(desk.rows[20:])
    assert desk.look(answer, start=20).good
    assert not desk.look(answer).good


def test_an_answer_may_say_its_release(desk: Desk) -> None:
    """A live server of 0.30.0 does."""
    answer = desk.answer() | {"system_fingerprint": "vllm-0.30.0-e4aeb530"}
    assert desk.look(answer).what == "an answer of vLLM 0.30.0"
    assert desk.look(answer, version="0.31.0").what == "an answer of vLLM 0.31.0"
    assert desk.look(answer | {"system_fingerprint": "ours"}).what == "an answer of vLLM (release not given)"


# The copies of "counted" are rows of sampled tokens: that answer names its prompt of 90.
@pytest.mark.parametrize(("which", "first"), [("counted", 108), ("rows", 64), ("sglang", 64)])
def test_copies_are_no_fault_where_the_tokens_are_not_known(desk: Desk, which: str, first: int) -> None:
    """A model that says one thing again and again may route it alike; 8 copies may be 8 times one token."""
    desk.rows[first : first + 8] = desk.rows[first - 16 : first - 8]  # of tokens that it doesn't name
    what = desk.rows if which == "rows" else getattr(desk, which)()
    report = desk.look(what)
    assert report.good
    assert "alike for other tokens" in report.unchecked[0]
    assert "fingerprint" not in str(report.verdicts[0].facts)  # of tokens that nobody named
    if what is desk.rows:
        assert not desk.look(desk.rows, **desk.ids).good


# SGLang's answers


def test_answers_of_sglang(desk: Desk) -> None:
    ids = {"prompt_ids": desk.ids["prompt_ids"]}
    report = desk.look(desk.sglang(), **ids)
    assert (report.good, report.unchecked) == (True, [])
    assert report.what == "an answer of SGLang (release not given)"
    answer = desk.sglang()
    broken = answer | {"meta_info": answer["meta_info"] | {"completion_tokens": "many"}}
    good, bad = desk.look([answer, broken], **ids).verdicts  # one that can't be read is refused alone
    assert not good.problem
    assert "completion_tokens is no count" in bad.problem
    shifted(desk.rows)
    report = desk.look([desk.sglang()], version="0.5.12", **ids)
    assert report.bad[0].problem.startswith("SGLang 0.5.12, request 3f9d")


# Arrays, files, folders


def test_an_array_with_its_tokens(desk: Desk) -> None:
    """All layers, or those with experts alone; all rows, or from a start on."""
    for rows, start in ((desk.rows.astype(np.int32), 0), (desk.rows[:, 1:], 0), (desk.rows[50:], 50)):
        report = desk.look(rows, **desk.ids, start=start)
        assert report.good
        assert report.unchecked == []
        assert [layer["layer"] for layer in report.layers] == list(EACH)
    for rows in (desk.rows[50:], desk.rows[:0]):
        assert "fewer tokens" in desk.refusal(rows, **desk.ids)
    stale(desk.rows)
    assert "another token's" in desk.refusal(desk.rows, **desk.ids)
    assert "more tokens than it ran" in desk.refusal(desk.rows, prompt_ids=desk.ids["prompt_ids"])


def test_routes_of_ours(desk: Desk) -> None:
    every = desk.put(SAMPLE.tokens, "all.json")
    none = desk.put([], "none.json")
    for form in (ROUTES, ROUTES.to_bytes()):
        report = desk.look(form, prompt_ids=every, output_ids=none)
        assert (report.good, report.unchecked) == (True, [])
        assert "weights step 3" in report.verdicts[0].facts
        assert [layer["rows"] for layer in report.layers] == [119] * 7
    unnamed = desk.look(ROUTES.take(range(TOKENS)), prompt_ids=every, output_ids=none)
    assert (unnamed.good, "no fingerprint" in unnamed.unchecked[0]) == (True, True)
    assert desk.look(ROUTES, config=None).good
    others = desk.put([*SAMPLE.tokens[:-1], 511], "others.json")
    for words, how in (
        ("number of tokens", {"prompt_ids": every, "output_ids": every}),
        ("other tokens", {"prompt_ids": others, "output_ids": none}),
        ("another model", {"config": desk.put(CONFIG | {"num_experts": 64}, "larger.json")}),
    ):
        assert words in desk.refusal(ROUTES, **how)
    assert desk.look(ROUTES, prompt_ids=every).good, "there may be no --output-ids"


def test_an_array_may_have_a_row_of_the_last_token_and_says_how_it_counts(desk: Desk) -> None:
    """A token's row that has no route is -1: of the last it stands for nothing, of another it is a fault."""
    rows = desk.rows.astype(np.int16)
    whole = np.concatenate([rows, np.full_like(rows[:1], -1)])
    without = desk.look(rows)
    assert "no engine runs the last token" in without.what
    again = desk.look(whole)
    assert again.good
    assert again.layers == without.layers
    whole[2] = -1
    problem = desk.refusal(whole)
    assert "first in row 2, the last in row 2" in problem
    assert "RoutedExperts(recorded=)" in problem


@pytest.mark.parametrize("form", ["rows", "bytes", "file"])
def test_a_sample_of_one_sequence_is_refused(desk: Desk, form: str) -> None:
    """A number that is meant for another file would be left aside in silence."""
    what = {"rows": desk.rows, "bytes": ROUTES.to_bytes(), "file": ROUTES}[form]
    with pytest.raises(ReplayError, match=r"one sequence in this file.*--sample 3"):
        desk.look(what, sample="3")
    assert desk.look(what).good


def test_a_damaged_file_is_refused(desk: Desk) -> None:
    data = ROUTES.to_bytes()
    path = desk.put(data)
    assert str(path) in desk.refusal(data[:-50], config=None)
    changed = data[:-500] + bytes([data[-500] ^ 1]) + data[-499:]
    assert "changed after they were written" in desk.refusal(changed, config=None)


def test_a_folder_of_many(desk: Desk, run: Callable[..., Result]) -> None:
    store = desk.folder / "store"
    with RouteStore.writer(store, shard_bytes=1) as writer:
        for number in range(4):
            writer.add(expected(MODEL, sampled(MODEL, 51 + number, 30)), key=f"sample-{number}")
    result = run(store)
    assert result.exit_code == 0
    for words in ("4 samples", "4 sequences, 330 tokens", "ok (4 sequences), as far as it could be checked"):
        assert words in result.stdout
    assert inspect(store, sample="sample-2").layers[0]["rows"] == 82
    with pytest.raises(ReplayError, match="no such sample"):
        inspect(store, sample="sample-9")
    with pytest.raises(ReplayError, match="no routes in this folder"):
        inspect(store.parent)
    assert not inspect(store / "routes-00000.safetensors").good
    shard = store / "routes-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-200] ^= 1
    shard.write_bytes(data)
    result = run(store)
    assert result.exit_code == 1
    for words in ("refused: 1 of 4 sequences", "- sample-1: ", "changed after they were written"):
        assert words in result.stdout
    assert not inspect(store, sample="sample-1").good
    assert inspect(store).layers[0]["rows"] == 80 + 82 + 83


# What is no data at all


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x00\x01garbage\xff" * 40, "nobody knows"),
        (b'data: {"choices": []}\n\n', "nobody knows"),
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"answer": 42}', "can't be told"),
        (b'{"choices": [{"index": 0, "token_ids": [1]}]}', "can't be told"),
        (b'{"data":{"routes": 42}}', "can't be told"),  # its ninth byte is that of a saved file
        (b"[" * 100_000, "nobody knows"),
        (b'{"choices": [{"routed_experts": 7}]}', "return_token_ids"),
        (b'{"choices": "x", "meta_info": 3}', "SGLang"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "isn't an .npy"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{" + b" " * 40, "can't be read"),
    ],
)
def test_foreign_data_is_one_message(desk: Desk, run: Callable[..., Result], data: bytes, words: str) -> None:
    result = run(desk.put(data), "--config", desk.config)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    message = " ".join((result.stdout + result.stderr).split())
    assert words in message, message


@pytest.mark.parametrize(("path", "words"), [("/dev/zero", "no plain file"), ("nothing", "no such file")])
def test_what_is_no_file_is_refused(path: str, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        inspect(Path(path))


# For programs


def test_json(desk: Desk, run: Callable[..., Result]) -> None:
    good = run(desk.put(desk.answer()), "--config", desk.config, "--json")
    assert good.exit_code == 0
    report = json.loads(good.stdout)
    assert (report["ok"], report["num_experts"], "error" in report) == (True, EXPERTS, False)
    sizes = {"tokens": 120, "rows": 119, "layers": 7, "topk": 4}
    facts = [f"fingerprint {fingerprint(SAMPLE.tokens):#018x}"]
    assert report["sequences"] == [{"name": "", "problem": "", "facts": facts} | sizes]
    assert [layer["rows"] for layer in report["layers"]] == [119] * 7
    named_twice(desk.rows)
    bad = run(desk.put(desk.answer()), "--config", desk.config, "--json")
    assert bad.exit_code == 1
    report = json.loads(bad.stdout)
    assert "name an expert twice" in report["sequences"][0]["problem"]
    assert report["error"] == report["sequences"][0]["problem"]
    missing = run(desk.folder / "nothing", "--json")
    assert missing.exit_code == 1
    assert "no such file" in json.loads(missing.stdout)["error"]
