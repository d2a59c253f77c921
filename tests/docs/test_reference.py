"""What is looked up is complete and true: metrics, switches, errors, tables of stacks, engines, docstrings.

The examples in docstrings know npu_replay, torch and np; a small Qwen3-MoE `model` and its `batch`, two
sequences of 12 tokens; and `routes` of three tokens, the last without one, in the layers 3 and 7.
"""

from __future__ import annotations

import doctest
import importlib
import itertools
import re
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_replay
from examples.qwen3_moe.model import qwen3_moe
from npu_replay import ReplayError, errors
from npu_replay.compat import vllm
from npu_replay.compat.megatron_backports import router_replay
from npu_replay.compat.verl import metrics
from sessions.test_contract import UNABLE
from test_house import MODULES
from zoo.toys import HIDDEN, ToyModel

ROOT = Path(__file__).parents[2]
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}


def page_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    return page_of(name).split(f"## {title}\n")[1].split("\n## ")[0]


def keys(text: str) -> set[str]:
    return set(re.findall(r"(?m)^\| `([\w/]+)` \|", text))


def test_every_metric_of_a_block_is_told() -> None:
    model = qwen3_moe(0, torch.device("cpu")).train()
    batch = torch.randint(0, 512, (2, 9))
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(input_ids=batch)
    with npu_replay.replay(model, recording.routes, live_mismatch=True) as session:
        model(input_ids=batch)
    of_blocks = recording.metrics().keys() | session.metrics().keys()
    assert keys(section("metrics", "Keys of a block")) == of_blocks | {
        "capacity_dropped",  # under a capacity alone
        "overlap",  # of an engine's routes alone
    }
    with npu_replay.follow(model) as following:
        with torch.no_grad():
            model(input_ids=batch)
        model(input_ids=batch).logits.sum().backward()
    assert keys(section("metrics", "Keys of follow")) == following.metrics().keys() - of_blocks


def test_every_metric_of_a_verl_job_is_told() -> None:
    sums = dict.fromkeys(metrics.COUNTED, 1) | {"ranks": 1}
    assert keys(section("metrics", "Keys of a verl job")) == metrics.figures(sums).keys()


def test_every_switch_is_told() -> None:
    """In one table."""
    named = set(re.findall(r"NPU_REPLAY_[A-Z_]+[A-Z]", "".join(SOURCES.values())))
    assert named == set(re.findall(r"NPU_REPLAY_[A-Z_]+[A-Z]", section("metrics", "Switches")))


# docs/errors.md


def test_every_class_of_errors_is_there_and_none_is_missing() -> None:
    of_router_replay = {"NoTarget", "AnotherNumber"}
    rows = [line.split("|")[3] for line in page_of("errors").splitlines() if line.startswith("| ")]
    shown = set(re.findall(r"`(\w+)`", " ".join(rows))) - {"IndexError", "ValueError"}
    public = {
        name
        for name in npu_replay.__all__
        if isinstance(value := getattr(npu_replay, name), type) and issubclass(value, ReplayError)
    }
    assert public | of_router_replay == shown
    assert all(issubclass(getattr(router_replay, name), ReplayError) for name in of_router_replay)


@pytest.mark.usefixtures("toy_routers")
def test_the_example_of_an_error_is_what_a_user_reads() -> None:
    model = ToyModel()
    with torch.no_grad(), npu_replay.record(model) as recording:
        for tokens in (5, 10):
            model(torch.randn(tokens, HIDDEN))
    with pytest.raises(ReplayError) as raised, npu_replay.replay(model, recording.routes):
        model(torch.randn(5, HIDDEN))
        model(torch.randn(7, HIDDEN))
    example = re.findall(r"```text\n(.*?)```", page_of("errors"), re.DOTALL)[0]
    assert " ".join(example.split()) == " ".join(str(raised.value).split())


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 knows no notes")
def test_a_traceback_ends_with_the_page_of_cures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lies: beside the package in the source, inside it as a wheel has it (test_wheel.py)."""

    def last_lines(error: Exception) -> list[str]:
        errors.cures.cache_clear()
        return "".join(traceback.format_exception_only(error)).splitlines()[1:]

    page = ROOT / "docs" / "troubleshooting.md"
    chinese = ", and in Chinese zh/troubleshooting.md beside it"
    assert last_lines(ReplayError("no routes").at("layer 3")) == [f"Symptoms and cures: {page}{chinese}"]
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "errors.py"))
    (missing,) = last_lines(ReplayError("no routes"))
    assert missing.endswith(f"docs/troubleshooting.md in npu_replay's source{chinese}")
    (tmp_path / "docs").mkdir()
    copy = shutil.copy(page, tmp_path / "docs")
    assert last_lines(ReplayError("no routes")) == [f"Symptoms and cures: {copy}{chinese}"]
    errors.cures.cache_clear()


# What a stack can't do

ROWS = {"follow": "`follow`", "aux loss": '`aux_loss="replayed"`', "capacity": "capacity"}
STACKS = {"megatron": "Megatron", "megatron hybrid": "HybridModel"}
"""By what the page calls them; the others but the toy are transformers'."""


def test_the_page_of_models_has_the_expected_failures_of_every_stack() -> None:
    """Those of the contract."""
    expected: dict[tuple[str, str], list[str]] = {}
    for row, reasons in UNABLE.items():
        for stack, why in reasons.items():
            names = expected.setdefault((ROWS[row], why), [])
            if stack != "toy" and (name := STACKS.get(stack, "transformers")) not in names:
                names.append(name)
    lines = [f"| {row} | {', '.join(names)} | {why} |" for (row, why), names in expected.items() if names]
    table = section("models", "What a stack can't do").splitlines()
    assert [line for line in table if line.startswith("|")][2:] == lines


# The tables of the engines' pages

ENGINES = "\n".join(page_of(name) for name in ("vllm", "vllm-ascend"))
RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first heading."""
    lines = ENGINES.split(f"\n| {title} |")[1].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def refusal(version: str, **arguments: Any) -> str:
    """Why engine_arguments refuses these; empty where it doesn't."""
    try:
        vllm.engine_arguments(version, **arguments)
    except ReplayError as error:
        return str(error)
    return ""


def test_the_table_of_vllm_is_what_engine_arguments_says() -> None:
    for release, adds, _ in table("release | `engine_arguments` adds"):
        assert adds.startswith("refused") == ("is older than" in refusal(release))
        if not adds.startswith("refused"):
            plan = vllm.engine_arguments(release)
            words = [f"`{name}={value}`" for name, value in plan.arguments.items()]
            words += [f"environment `{name}={value}`" for name, value in plan.environment.items()]
            assert adds == ", ".join(words), release


HYBRID = {
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
OLD = {"refused: older than what is checked": "is older than", "refused: every id is 0": "zeros for every"}


def with_the_plug_in(beside: str, **asked: Any) -> str:
    """What engine_arguments says of a release with capture=True, in the table's words."""
    if refusal(beside, **asked):
        return "refused"
    if refusal(beside, **asked, model=HYBRID):
        return "all experts, except in hybrid models"
    environment = vllm.engine_arguments(beside, **asked).environment
    return "all experts" + (", with Model Runner V2" if RUNNER_V2 in environment else "")


def test_the_table_of_vllm_ascend_is_what_engine_arguments_says() -> None:
    for release, says, captured in table("vllm-ascend"):
        beside = "0.23.0" if release == "0.13.0" else release.split("rc")[0]
        asked = {"vllm_ascend": release, "quantization": "ascend"}
        assert captured == with_the_plug_in(beside, **asked, capture=True), release
        if says.startswith("refused"):
            assert OLD[says] in refusal(beside, vllm_ascend=release)
            continue
        made = vllm.engine_arguments(beside, vllm_ascend=release)
        several = refusal(beside, vllm_ascend=release, planned={"data_parallel_size": 2})
        assert ("without data" in says) == ("AssertionError" in several)
        quantized = "captures no quantized experts" not in refusal(beside, **asked)
        assert ("unquantized experts" in says) == (not quantized), release
        assert ("Model Runner V2" in says) == (RUNNER_V2 in made.environment), release


def test_the_table_of_sglang_has_the_releases_in_which_something_changes() -> None:
    """What changes in each: tests/compat/sglang."""
    shown = [release for release, _ in table("release | routes")]
    assert shown == ["0.5.7", "0.5.8", "0.5.9", "0.5.12", "0.5.13", "0.5.23"]


# The examples in docstrings


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    ids = np.array([[[0, 3], [1, 2]], [[2, 1], [0, 1]], [[-1, -1], [-1, -1]]])
    recorded = np.array([True, True, False])
    sizes = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return {
        "npu_replay": npu_replay,
        "torch": torch,
        "np": np,
        "model": qwen3_moe(0, torch.device("cpu"), **sizes).float().train(),
        "batch": torch.arange(24).view(2, 12),
        "routes": npu_replay.RoutedExperts(ids=ids, layers=[3, 7], num_experts=4, recorded=recorded),
    }


@pytest.mark.parametrize("module", [module for module, text in SOURCES.items() if ">>>" in text])
def test_the_examples_of_a_module_give_what_they_say(
    module: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what an example saves
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(importlib.import_module(module), extraglobs=names, optionflags=options)
    assert tried
    assert not failed, "its output is above"
