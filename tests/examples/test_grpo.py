"""The GRPO example with a small model that answers as vLLM's server does: what ends a run, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import json_server
import npu_replay
import vllm_outputs
from npu_replay import ReplayError, RoutedModel

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"
NAMES = tuple(file.stem for file in EXAMPLE.glob("*.py"))
STEPS = 3


class Engine:
    """vLLM's server, as `server.Server` asks it.

    Attributes:
        before: called with each path before it is answered: what goes wrong, and when.
        deaf: it says that it took weights, and goes on with those it has.
    """

    def __init__(self, folder: Path) -> None:
        self.routed = RoutedModel.from_config(folder)
        self.before: Callable[[str], None] = lambda path: None
        self.deaf = False
        self.start(folder)

    def start(self, folder: Path) -> None:
        """Anew: a server knows nothing of the weights that an earlier one was given."""
        self.version = "default"
        self._take(folder)

    def _take(self, folder: Path | str) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def answer(self, path: str, body: Any) -> Any:
        self.before(path)
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc" and not self.deaf:
            self._take(*body["args"])
        return self._completions(body) if path == "/v1/completions" else None

    def _completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = asked["prompt"]
        most = asked["max_tokens"]
        tokens = torch.tensor([prompt] * asked["n"])
        for _ in range(most):
            with torch.no_grad(), npu_replay.record(self.model) as recording:
                scores = self.model(tokens, use_cache=False).logits.float().log_softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(scores[:, -1].exp(), 1)], dim=1)
        with torch.no_grad():
            scores = self.model(tokens, use_cache=False).logits.float().log_softmax(-1)
        rows = recording.routes[-1].ids.view(asked["n"], -1, *recording.routes[-1].ids.shape[1:]).numpy()
        log_probs = scores[:, :-1].gather(2, tokens[:, 1:, None])[:, -most:, 0]
        sampled = [
            vllm_outputs.Sampled(prompt, one[-most:], np.concatenate([ran, ran[-1:]]).astype(np.int64))
            for one, ran in zip(tokens.tolist(), rows, strict=True)
        ]
        said = vllm_outputs.answer("0.30.0", self.routed, *sampled, endpoint="completions", with_ids=True)
        for choice, found in zip(said["choices"], log_probs.tolist(), strict=True):
            choice["logprobs"] = {"token_logprobs": found}
        return said


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's loop around a plain model of transformers, and the engine over HTTP."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import task
    from loop import Grpo
    from policies import Policy
    from roads import Answer
    from server import Server
    from settings import ARMS, Settings

    class Plain(Policy):
        order = "batch"

        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.model = type(self.like).from_pretrained(folder, dtype=torch.float32)

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(tokens, use_cache=False).logits
            return found

        def state(self) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = self.model.state_dict()
            return found

    def saved(seed: int) -> Path:
        torch.manual_seed(seed)
        task.save(task.model(2, 32), tmp_path / str(seed))
        return tmp_path / str(seed)

    alone = not dist.is_initialized()  # a demo that ran in this process before leaves its group
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(saved(0))
    small = Settings(steps=STEPS, prompts=4, group=2, mini_batches=2, evaluate_every=9, evaluated=2)

    with json_server.serving(engine.answer) as address:
        server = Server(address, str(tmp_path / "0"))
        server.count(0)

        def grpo(arm: str) -> Any:
            policy = Plain(tmp_path / "0")
            return Grpo(policy, Answer(server, tmp_path), ARMS[arm], small, 0, tmp_path / "weights")

        yield SimpleNamespace(grpo=grpo, engine=engine, taught=tmp_path / "0", other=saved(1))
    if alone:
        dist.destroy_process_group()
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("arm", ["none", "R2", "R3"])
def test_the_figures_of_a_run(job: Any, arm: str) -> None:
    rows = list(job.grpo(arm).steps())
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["first_ratio_is_1"] for row in rows)
    assert [row.get("replay_mismatch") for row in rows] == [None if arm == "none" else 0] * STEPS
    for name in ("router_mismatch", "update_mismatch", "token_mismatch"):
        assert all((row[name] == 0) == (arm == "R3") for row in rows), name
    assert all(row["token_mismatch"] >= row["router_mismatch"] for row in rows)
    assert all(row["token_mismatch"] <= 2 * row["router_mismatch"] for row in rows)  # of two layers


RESTARTS = {
    ("/weight_info", 1): "samples of weights 2 are wanted, got {None}",
    ("/v1/completions", 2): "the server's weights changed while it sampled",
    ("/weight_info", 3): "the server doesn't know how often it was given weights",
}


def weights(run: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in run.policy.model.parameters()]


@pytest.mark.choice(every=3)
@pytest.mark.parametrize(("path", "which"), RESTARTS)
def test_a_server_that_was_started_again_ends_the_run(job: Any, path: str, which: int) -> None:
    """Also with the weights that it was started with first: it doesn't know how often it was given some."""
    run = job.grpo("R3")
    asked = []
    steps = run.steps()
    next(steps)
    before = weights(run)

    def restart(now: str) -> None:
        asked.append(now)
        if now == path and asked.count(path) == which:
            job.engine.start(job.taught)

    job.engine.before = restart
    with pytest.raises((ReplayError, RuntimeError), match=RESTARTS[path, which]):
        next(steps)
    if which < 3:  # not while the weights of this step are handed over
        assert all(map(torch.equal, before, weights(run))), "no optimizer step"


def test_an_engine_with_other_weights_under_the_right_number_ends_the_run(job: Any) -> None:
    """As vLLM in the trainer's process would: its number is the trainer's own. The routes give it away."""
    run = job.grpo("R3")
    steps = run.steps()
    next(steps)
    before = weights(run)
    job.engine._take(job.other)
    with pytest.raises(ReplayError, match="far from what the routers would choose"):
        next(steps)
    assert all(map(torch.equal, before, weights(run))), "no optimizer step"


def test_rows_of_weights_that_are_a_step_older_are_near_enough_to_pass(job: Any) -> None:
    """docs/grpo.md says so: neither the number nor the overlap shows an engine that took nothing."""
    job.engine.deaf = True
    assert len(list(job.grpo("R3").steps())) == STEPS
