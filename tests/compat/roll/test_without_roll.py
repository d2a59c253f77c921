"""What of the shim for ROLL can be seen without ROLL. The rest runs on ROLL itself: tests/on_roll."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

import jobs
from npu_replay.compat import probe
from npu_replay.compat.roll import pipeline, strategy
from npu_replay.errors import ReplayError


def config(mode: str, name: str | None = "fsdp2_train") -> SimpleNamespace:
    arguments = None if name is None else SimpleNamespace(strategy_name=name)
    return SimpleNamespace(router_replay=SimpleNamespace(mode=mode), strategy_args=arguments)


@pytest.mark.parametrize(
    ("mode", "name", "wanted"),
    [
        ("R2", "fsdp2_train", "R2"),
        ("R3", "fsdp2_train", "R3"),
        ("disable", "fsdp2_train", "disabled"),
        ("R2", "fsdp2_infer", "disabled"),  # a reference: a record of it is no policy's
        ("R3", "megatron_train", "disabled"),  # ROLL's own
        ("R3", None, "disabled"),
    ],
)
def test_only_the_actor_on_fsdp2_is_ours(mode: str, name: str | None, wanted: str) -> None:
    assert strategy.mode_of(config(mode, name)) == wanted


def test_rolls_check_is_passed_by_and_other_strategies_keep_it() -> None:
    def post_init(self: SimpleNamespace) -> None:
        """As ROLL's: R2 isn't supported, whatever the strategy."""
        if self.router_replay.mode == "R2":
            raise NotImplementedError

    ours = config("R2")
    pipeline._checked(post_init, ours)
    assert (ours.router_replay.mode, type(ours.router_replay.mode)) == ("R2", pipeline.Mode)
    with pytest.raises(NotImplementedError):
        pipeline._checked(post_init, config("R2", "megatron_train"))


def test_the_engine_of_r3_is_checked_in_its_workers_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "products", lambda: (probe.Product("sglang", True, "0.5.23", "/there"),))
    infer = config("R3", "sglang")
    infer.strategy_args.strategy_config = {"tp_size": 2}
    checked: list[object] = []
    pipeline._checked(checked.append, infer)
    assert checked == [infer]
    infer.strategy_args.strategy_config["pp_size"] = 2
    with pytest.raises(
        ReplayError, match=r"ROLL's config, rollout: .*strategy_args\.strategy_config\.pp_size=2"
    ):
        pipeline._checked(checked.append, infer)
    infer.router_replay.mode = "disable"
    pipeline._checked(checked.append, infer)


@pytest.mark.slow
def test_a_workers_process_imports_npu_replay_with_its_config() -> None:
    """Ray sends a config and a class of ROLL's; nobody there would import npu_replay."""
    sent = pickle.dumps({"mode": pipeline.Mode("R2")})
    code = f"import pickle; mode = pickle.loads({sent!r})['mode']; "
    code += "print(json.dumps([mode == 'R2', 'npu_replay' in sys.modules]))"
    assert jobs.printed(code) == [True, True]


@pytest.mark.slow
def test_a_workers_class_brings_npu_replay_before_ray_binds_its_methods(tmp_path: Path) -> None:
    """Ray takes an actor's functions from its class when it loads that, before it unpickles the config."""
    pytest.importorskip("ray")
    folder = tmp_path / "roll" / "pipeline"
    folder.mkdir(parents=True)
    for file in (tmp_path / "roll", folder):
        (file / "__init__.py").write_text("")
    (folder / "base_worker.py").write_text(
        "class ActorWorker:\n    def compute_log_probs(self, data): return 'its own'\n"
    )
    sent = tmp_path / "class"
    driver = f"""
sys.path.insert(0, {str(tmp_path)!r})
import npu_replay, ray
from ray import cloudpickle
from roll.pipeline.base_worker import ActorWorker
kind = ray.remote(ActorWorker).__ray_metadata__.modified_class
open({str(sent)!r}, "wb").write(cloudpickle.dumps(kind))
print(json.dumps(True))
"""
    assert jobs.printed(driver)
    worker = f"""
sys.path.insert(0, {str(tmp_path)!r})
import inspect, pickle
kind = pickle.load(open({str(sent)!r}, "rb"))
bound = dict(inspect.getmembers(kind, inspect.isfunction))["compute_log_probs"]
from npu_replay.compat.roll import pipeline
asked = []
pipeline.strategy.recorded = lambda strategy: asked.append(1)
made = object.__new__(kind)
made.strategy = None
print(json.dumps([bound(made, None), len(asked)]))
"""
    assert jobs.printed(worker) == ["its own", 1]


def test_a_reference_pass_of_a_lora_actor_is_no_pass_of_ours() -> None:
    class Strategy:
        worker_config = config("R2")

    actor = Strategy()
    seen: list[object] = []

    def forward_step(self: Strategy, batch: object) -> None:
        seen.append(strategy.StrategyAdapter.of(self).batch)

    strategy._forward_step(forward_step, actor, SimpleNamespace(meta_info={"disable_adapter": True}))
    assert seen == [None]


def test_another_strategy_is_refused_by_the_name_that_it_lacks() -> None:
    class FSDP2InferStrategy:
        def _fsdp2_forward(self, input_ids: object, attention_mask: object) -> None: ...
        def forward_step(self, batch: object) -> None: ...

    module = SimpleNamespace(__name__="roll.somewhere", FSDP2InferStrategy=FSDP2InferStrategy)
    with pytest.raises(ReplayError, match="get_feature_on_cp_rank") as raised:
        strategy._wrap(module)
    assert "another release of ROLL" in str(raised.value)
