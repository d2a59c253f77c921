"""The shim for ms-swift on a stand-in of the names that it changes. On ms-swift itself: tests/on_swift."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat import probe
from npu_replay.compat import swift as shim
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError

pytest.importorskip("transformers")

from sessions.test_carried_routes import rollout
from sessions.test_follow import Fed, learn, model, packed, padded, record, texts
from zoo.outcome import hooks

STAND_IN = {
    "__init__": "",
    "callbacks/__init__": """
class TrainerCallback:
    def __init__(self, args, trainer):
        self.args, self.trainer = args, trainer
""",
    "callbacks/mapping": "callbacks_map = {'its_own': object}",
    "rlhf_trainers/__init__": "",
    "rlhf_trainers/grpo_trainer": """
def collate_to_grpo_micro_batch(samples, template):
    inputs = dict(template)
    if all(sample.routed_experts is not None for sample in samples):
        inputs["routed_experts"] = "cut to the width of the completions"
    return inputs, samples
""",
}
Sample = SimpleNamespace


pytestmark = pytest.mark.usefixtures("unjudged")


@pytest.fixture(autouse=True)
def swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its trainer's module and its callbacks, as a job imports them."""
    for name, text in STAND_IN.items():
        path = tmp_path / "swift" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    npu_replay.install()
    from swift.callbacks import mapping  # type: ignore[import-not-found]
    from swift.rlhf_trainers import grpo_trainer  # type: ignore[import-not-found]

    yield SimpleNamespace(trainer=grpo_trainer, callbacks=mapping.callbacks_map)
    npu_replay.uninstall()
    shim._chosen.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "swift"]:
        del sys.modules[name]
    npu_replay.install()


def samples(fed: Fed, wanted: list[list[torch.Tensor]], last: bool = True) -> list[Any]:
    """As the engine answers: [tokens, layers, topk], with the last token's row or without."""
    each = [torch.stack(layers, dim=1).to(torch.int16) for layers in wanted]
    return [Sample(routed_experts=(rows if last else rows[:-1]).numpy()) for rows in each]


def callback(swift: Any, mode: str) -> Any:
    return swift.callbacks[f"npu_replay_{mode}"](SimpleNamespace(use_vllm=False), "the trainer")


def test_the_plan_of_its_vllm_is_checked_for_r3(swift: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "products", lambda: (probe.Product("vllm", True, "0.23.0", "/there"),))
    halves = SimpleNamespace(use_vllm=True, vllm_mode="colocate", vllm_engine_kwargs={"enable_dbo": True})
    with pytest.raises(
        ReplayError, match=r"ms-swift's config, rollout: .*vllm_engine_kwargs: enable_dbo=True"
    ):
        swift.callbacks["npu_replay_R3"](halves, "the trainer")
    assert swift.callbacks["npu_replay_R2"](halves, "the trainer").trainer == "the trainer"
    halves.vllm_engine_kwargs = {"enable_return_routed_experts": True}
    assert swift.callbacks["npu_replay_R3"](halves, "the trainer").trainer == "the trainer"


def test_the_callbacks_are_there_and_an_uninstall_takes_them_and_the_collate_back(swift: Any) -> None:
    assert set(swift.callbacks) == {"its_own", "npu_replay_R2", "npu_replay_R3"}
    assert callback(swift, "R3").trainer == "the trainer"
    ours = swift.trainer.collate_to_grpo_micro_batch
    npu_replay.uninstall()
    assert set(swift.callbacks) == {"its_own"}
    assert swift.trainer.collate_to_grpo_micro_batch is ours.__wrapped__


LAYOUTS = {
    "padded": lambda: padded(texts(), right=2),
    "padded on the left": lambda: padded(texts(), left=3),
    "packed": lambda: packed(texts(), end=3),
}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_r3_takes_a_samples_routes_in_each_pass_of_the_policy(swift: Any, layout: str, last: bool) -> None:
    """Each row is where its token is. What a call does with them: tests/sessions/test_carried_routes.py."""
    followed = model()
    fed = LAYOUTS[layout]()
    sent = samples(fed, rollout(fed), last)
    replay = callback(swift, "R3")
    replay.on_train_begin(None, None, None, model=followed)
    call, _ = swift.trainer.collate_to_grpo_micro_batch(sent, fed[0])
    rows = call["routed_experts"].flatten(0, 1)
    wanted = torch.zeros_like(rows)
    for places, sample in zip(fed[1], sent, strict=True):
        wanted[places[: len(sample.routed_experts)]] = torch.from_numpy(sample.routed_experts).to(rows.dtype)
    assert torch.equal(rows, wanted)
    for run in (record, learn):
        run(followed, (call, fed[1]))
    assert hooks(followed) > 0
    replay.on_train_end(None, None, None)
    assert hooks(followed) == 0
    assert replay.following.metrics()["carried"] == 2


def test_r2_refuses_a_rollouts_routes_by_name(swift: Any) -> None:
    """It would replay them, and say that it replays its own."""
    followed = model()
    fed = padded(texts())
    replay = callback(swift, "R2")
    replay.on_train_begin(None, None, None, model=followed)
    with pytest.raises(ReplayError, match=r"npu_replay_R2 replays its own.*--callbacks npu_replay_R3"):
        swift.trainer.collate_to_grpo_micro_batch(samples(fed, rollout(fed)), fed[0])
    call, _ = swift.trainer.collate_to_grpo_micro_batch([Sample(routed_experts=None)] * 5, fed[0])
    record(followed, (call, fed[1]))
    learn(followed, (call, fed[1]))
    replay.on_train_end(None, None, None)
    assert replay.following.metrics()["replayed"] == 5
    assert replay.following.metrics()["held"] == 0


def test_a_job_without_a_callback_is_left_as_it_is(swift: Any) -> None:
    fed = padded(texts())
    bad = [Sample(routed_experts=sample.routed_experts[2:]) for sample in samples(fed, rollout(fed))]
    call, _ = swift.trainer.collate_to_grpo_micro_batch(bad, fed[0])
    assert call["routed_experts"] == "cut to the width of the completions"


def test_a_sample_with_other_rows_than_tokens_is_refused() -> None:
    fed = padded(texts())
    routes = [sample.routed_experts for sample in samples(fed, rollout(fed))]
    with pytest.raises(InvalidRoutes, match=r"sample 2.*Expected 7 .or 6"):
        shim.laid_out([*routes[:2], routes[2][:5], *routes[3:]], fed[0])
    with pytest.raises(MicroBatchError, match="fewer sequences than samples"):
        shim.laid_out([*routes, routes[0]], fed[0])
