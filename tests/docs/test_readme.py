"""README.md: its loops run, what it points to is there, and other files say the same of releases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch

import vllm_outputs
from npu_replay import RoutedModel, cli
from npu_replay.cli import commands
from npu_replay.compat.vllm import releases
from npu_replay.demo.rollout import qwen3_moe
from npu_replay.doctor import report

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
R2, R3 = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def log_probs(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=batch).logits.float().log_softmax(dim=-1)
    return scores[:, :-1].gather(2, batch[:, 1:, None]).squeeze(2)


def policy_loss(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return -(new - old).exp().mean()


@pytest.fixture
def names() -> dict[str, Any]:
    """What the examples leave to the reader."""
    model = qwen3_moe(0, torch.device("cpu")).train()
    return {
        "torch": torch,
        "model": model,
        "micro_batches": [torch.randint(0, 512, (2, 12)) for _ in range(3)],
        "log_probs": log_probs,
        "policy_loss": policy_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
    }


def test_the_r2_loop_runs_and_replays_what_it_recorded(names: dict[str, Any]) -> None:
    exec(compile(R2, "README.md", "exec"), names)
    routes = names["recording"].routes
    assert [(len(one), one.layers) for one in routes] == [(24, tuple(range(6)))] * 3
    assert all(one.recorded.all() for one in routes)


def test_the_r3_loop_runs_on_answers_of_every_form(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names["model"].config.save_pretrained(tmp_path / "Qwen3-30B-A3B")
    routed = RoutedModel.from_config(names["model"].config)
    rollouts = [vllm_outputs.sampled(routed, prompt=20, output=length, seed=length) for length in (10, 16)]
    tokens = [torch.as_tensor(one.tokens) for one in rollouts]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    names["model"].resize_token_embeddings(int(padded.max()) + 1)
    names |= {
        "sequences": [one.tokens for one in rollouts],
        "padded_batch": padded,
        "loss": lambda output: output.logits.float().square().mean(),
    }
    of_transformers = R3.replace("fingerprints=", 'order="batch", fingerprints=', 1)
    for outputs in (
        [vllm_outputs.request_output("0.14.0", routed, one) for one in rollouts],
        [vllm_outputs.answer("0.21.0", routed, one) for one in rollouts],
    ):
        exec(compile(of_transformers, "README.md", "exec"), names | {"outputs": outputs})


def test_the_versions_are_those_of_the_package_and_of_doctor() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.7" in project["dependencies"]
    assert "| torch 2.7 to 2.13, Python 3.11 and 3.12; 3.10 installs |" in TEXT
    assert project["requires-python"] == ">=3.10"
    facts = report.TorchFacts("2.3.0", "it doesn't tell", "", 0)
    assert "2.7 to 2.13" in report._recompute(facts).remedy
    assert "torch from 2.7 on" in (ROOT / "docs" / "dev" / "dependencies.md").read_text(encoding="utf-8")
    script = (ROOT / "ci" / "environment.sh").read_text(encoding="utf-8")
    assert "version_info < (3, 11)" in script


def test_what_it_says_of_vllm_is_what_the_decoder_says() -> None:
    assert releases.FIRST == "0.14.0"
    http = [fault for fault in releases.FAULTS if fault.only == ("http",) and fault.sure]
    assert [fault.until for fault in http] == ["0.21.0"]
    assert "vLLM from 0.14 on but 0.15, over HTTP from 0.21 on" in R3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    there = {link for link in links if link and "://" not in link}
    assert {link for link in there if not (page.parent / link).exists()} == set()
    scripts = set(re.findall(r"\bci/[\w/]+\.(?:sh|py|toml|txt)\b", text))
    assert {script for script in scripts if not (ROOT / script).is_file()} == set()


def test_every_command_that_is_named_is_one() -> None:
    known = {str(command.name or command.callback.__name__) for command in commands.app.registered_commands}
    assert set(cli.ALONE) < known
    for page in PAGES:
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        named = set(re.findall(r"(?:npu-replay|-m npu_replay) (\w+)", "".join(blocks)))
        assert named <= known, page.name
