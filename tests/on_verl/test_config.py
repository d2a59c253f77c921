"""compat.verl_config, on the configs that verl itself composes: what replay would be off or wrong with."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verl
from omegaconf import DictConfig, OmegaConf

from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook, patches, served_modules
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import config as verl_config
from npu_replay.errors import ReplayError
from verl_configs import FLAG, HAS_LEGACY, NEW, OLD, UNPADDED, engine_workers_replay, job, read_and_ignored

LEGACY = [pytest.param(True, id="legacy", marks=pytest.mark.skipif(not HAS_LEGACY, reason="0.7 has them"))]
ENGINE = [
    pytest.param(
        False,
        id="engine",
        marks=pytest.mark.skipif(not engine_workers_replay(), reason="0.7.0's don't replay"),
    )
]
WORKERS = pytest.mark.parametrize("legacy", LEGACY + ENGINE)


def with_workers(config: DictConfig, legacy: bool) -> Any:
    """The actor's part of the config, of a job with these workers."""
    if HAS_LEGACY:
        config.trainer.use_legacy_worker_impl = "auto" if legacy else "disable"
    return config.actor_rollout_ref


@pytest.fixture(autouse=True)
def no_engine_installed(monkeypatch: pytest.MonkeyPatch) -> list[probe.Product]:
    """What `probe` finds; a test adds the rollout engines that it wants."""
    found = [product for product in probe.products() if product.name == "verl"]
    monkeypatch.setattr(probe, "products", lambda: tuple(found))
    return found


@pytest.mark.parametrize("trainer", ["ppo_megatron_trainer", "ppo_trainer"])
def test_a_job_without_replay_is_left_alone(trainer: str) -> None:
    config = job({"actor_rollout_ref.model.use_remove_padding": False}, trainer=trainer)
    verl_config.check_actor(config.actor_rollout_ref)
    assert verl_config.mode_of(config.actor_rollout_ref) == "disabled"


@WORKERS
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_right_config_passes_and_its_mode_is_known(legacy: bool, mode: str) -> None:
    key, _ = read_and_ignored(legacy)
    actor = with_workers(job({key: mode, FLAG: mode == "R3"}), legacy)
    verl_config.check_actor(actor)
    verl_config.check_actor(actor, legacy=legacy)
    assert verl_config.mode_of(actor) == verl_config.mode_of(actor, legacy=legacy) == mode


@WORKERS
def test_a_plain_dict_does_too(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    config = with_workers(job({key: "R3"}), legacy)
    plain = OmegaConf.to_container(config, resolve=False)
    with pytest.raises(ReplayError, match=f"Expected {FLAG}=True"):
        verl_config.check_actor(plain, legacy=legacy)
    assert verl_config.mode_of(plain, legacy=legacy) == "R3"


@WORKERS
def test_a_mode_under_the_key_of_another_release_is_an_error_and_not_silence(legacy: bool) -> None:
    key, ignored = read_and_ignored(legacy)
    actor = with_workers(job({ignored: "R3", FLAG: True}), legacy)
    with pytest.raises(ReplayError) as error:
        verl_config.check_actor(actor)
    message = str(error.value)
    assert message.startswith(
        f"[npu_replay] verl's config: {ignored}=R3 is set, and these workers don't read it"
    )
    assert f"Expected {key}=R3, got {key}=disabled" in message
    assert verl_config.mode_of(actor) == "disabled"


@WORKERS
def test_both_keys_may_say_the_same(legacy: bool) -> None:
    verl_config.check_actor(with_workers(job({OLD: "R2", NEW: "R2"}), legacy))
    key, ignored = read_and_ignored(legacy)
    with pytest.raises(ReplayError, match=f"{ignored}=R3 is set"):
        verl_config.check_actor(with_workers(job({key: "R2", ignored: "R3"}), legacy))


@pytest.mark.skipif(engine_workers_replay(), reason="0.7.0's engine workers know no replay")
def test_engine_workers_that_know_no_replay_are_named() -> None:
    with pytest.raises(ReplayError, match=r"these workers know no replay.*legacy workers alone"):
        verl_config.check_actor(with_workers(job({OLD: "R2"}), legacy=False))


@WORKERS
def test_r3_without_the_rollouts_routes_is_refused(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    with pytest.raises(ReplayError, match=f"Expected {FLAG}=True, got {FLAG}=False"):
        verl_config.check_actor(with_workers(job({key: "R3"}), legacy))


@WORKERS
def test_t4_t20_r2_with_the_rollouts_routes_is_refused(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    with pytest.raises(ReplayError, match=f"R2 records its own.*Expected {FLAG}=False, got {FLAG}=True"):
        verl_config.check_actor(with_workers(job({key: "R2", FLAG: True}), legacy))


@WORKERS
def test_t20_r2_with_bypassed_log_probs_is_refused_in_a_worker_too(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    settings = {key: "R2", "algorithm.rollout_correction.bypass_mode": True}
    actor = with_workers(job(settings), legacy)
    # As it arrives in a worker: through Ray's pickle.
    from ray import cloudpickle

    with pytest.raises(ReplayError, match="bypass mode leaves that pass out"):
        verl_config.check_actor(cloudpickle.loads(cloudpickle.dumps(actor)))
    verl_config.check_actor(with_workers(job({**settings, key: "R3", FLAG: True}), legacy))


@WORKERS
def test_files_of_routes_are_refused_where_nothing_reads_them(legacy: bool) -> None:
    """verl itself has these keys in every release, and reads them in none."""
    key, _ = read_and_ignored(legacy)
    record, replay = (key.replace(".mode", name) for name in (".record_file", ".replay_file"))
    recording, replaying = {key: "R2", record: "/routes"}, {key: "R3", replay: "/routes"}
    if legacy:
        for lines in (recording, replaying):
            with pytest.raises(ReplayError, match=r"these workers don't write or read routes.*use_legacy"):
                verl_config.check_actor(with_workers(job(lines), legacy))
        return
    for lines in (recording, replaying):
        verl_config.check_actor(with_workers(job(lines), legacy))
    with pytest.raises(ReplayError, match=r"R2 records anew, and .*replay_file asks for a replay"):
        verl_config.check_actor(with_workers(job({key: "R2", replay: "/routes"}), legacy))


@WORKERS
def test_padded_sequences_are_refused(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    name = next(name for name in UNPADDED if ("megatron" in name) == legacy)
    with pytest.raises(ReplayError, match=f"needs packed sequences. Expected {name}=True"):
        verl_config.check_actor(with_workers(job({key: "R2", name: False}), legacy))


@WORKERS
def test_dynamic_context_parallelism_over_virtual_stages_is_refused(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    megatron = "actor_rollout_ref.actor.megatron"
    settings = {key: "R2", f"{megatron}.dynamic_context_parallel": True}
    verl_config.check_actor(with_workers(job(settings), legacy))
    settings[f"{megatron}.virtual_pipeline_model_parallel_size"] = 2
    with pytest.raises(ReplayError, match="dynamic context parallelism over virtual pipeline"):
        verl_config.check_actor(with_workers(job(settings), legacy))


@pytest.mark.parametrize("key", [OLD, NEW])
def test_a_mode_in_an_fsdp_job_is_refused(key: str) -> None:
    with pytest.raises(ReplayError, match=r"know no replay for actor.strategy=fsdp"):
        verl_config.check_actor(job({key: "R2"}, trainer="ppo_trainer").actor_rollout_ref)


@WORKERS
@pytest.mark.parametrize("name", ["trtllm", "hf"])
def test_r3_with_a_rollout_that_verl_never_asks_for_routes_is_refused(legacy: bool, name: str) -> None:
    if not (Path(verl.__path__[0]) / "workers" / "rollout" / f"{name}_rollout").is_dir() and name != "hf":
        pytest.skip(f"this verl has no {name}")
    key, _ = read_and_ignored(legacy)
    actor = with_workers(job({key: "R3", FLAG: True, "actor_rollout_ref.rollout.name": name}), legacy)
    with pytest.raises(ReplayError, match=rf"never asks {name} for them.*vllm"):
        verl_config.check_actor(actor)


@WORKERS
def test_a_rollout_of_the_users_own_is_let_through(legacy: bool) -> None:
    key, _ = read_and_ignored(legacy)
    settings = {key: "R3", FLAG: True, "actor_rollout_ref.rollout.name": "ours"}
    verl_config.check_actor(with_workers(job(settings), legacy))


@WORKERS
@pytest.mark.parametrize(
    ("engine", "version", "gives"),
    [
        ("vllm", "0.13.0", False),
        ("vllm", "0.14.1", True),
        ("vllm", "0.15.1+empty", False),
        ("vllm", "0.18.0", True),
        ("vllm", "0.21.0", False),
        ("vllm", "0.23.0", True),
        ("vllm-ascend", "0.13.0", False),
        ("vllm-ascend", "0.18.0rc1", True),
        ("vllm-ascend", "0.23.0.post1", True),
        ("vllm-ascend", "0.24.0rc1", False),
        ("vllm-ascend", "0.26.0rc1", False),
        ("vllm-ascend", "0.29.0rc1", True),
        ("sglang", "0.5.6", False),
    ],
)
def test_r3_with_a_release_of_the_engine_that_gives_no_routes_is_refused(
    legacy: bool, no_engine_installed: list[probe.Product], engine: str, version: str, gives: bool
) -> None:
    no_engine_installed.append(probe.Product(engine, True, version, "/somewhere"))
    rollout = "sglang" if engine == "sglang" else "vllm"
    if rollout == "sglang" and not engine_workers_replay():
        pytest.skip("0.7.0 never asks SGLang at all")
    key, _ = read_and_ignored(legacy)
    actor = with_workers(job({key: "R3", FLAG: True, "actor_rollout_ref.rollout.name": rollout}), legacy)
    if gives:
        verl_config.check_actor(actor)
        return
    with pytest.raises(ReplayError, match=f"{engine} {version.replace('+', '.')} gives no routes"):
        verl_config.check_actor(actor)


@WORKERS
def test_0_15_0_is_taken_on_the_vllm_ascend_that_captures_by_itself(
    legacy: bool, no_engine_installed: list[probe.Product]
) -> None:
    """As engine_arguments and from_vllm take it."""
    no_engine_installed.append(probe.Product("vllm", True, "0.15.0", "/somewhere"))
    no_engine_installed.append(probe.Product("vllm-ascend", True, "0.15.0rc1", "/somewhere"))
    key, _ = read_and_ignored(legacy)
    verl_config.check_actor(with_workers(job({key: "R3", FLAG: True}), legacy))


@WORKERS
def test_zeros_of_sglang_on_an_npu_are_refused(
    legacy: bool, no_engine_installed: list[probe.Product]
) -> None:
    if not engine_workers_replay():
        pytest.skip("0.7.0 never asks SGLang at all")
    key, _ = read_and_ignored(legacy)
    lines = {key: "R3", FLAG: True, "actor_rollout_ref.rollout.name": "sglang"}
    no_engine_installed.append(probe.Product("sglang", True, "0.5.8", "/somewhere"))
    verl_config.check_actor(with_workers(job(lines), legacy))
    no_engine_installed.append(probe.Product("torch_npu", True, "2.7.1", "/somewhere"))
    with pytest.raises(ReplayError, match=r"sglang 0\.5\.8 gives no routes.*0\.5\.9 or later"):
        verl_config.check_actor(with_workers(job(lines), legacy))


@WORKERS
def test_a_quantized_rollout_on_ascend_is_refused_where_it_gives_zeros(
    legacy: bool, no_engine_installed: list[probe.Product]
) -> None:
    """vllm-ascend before 0.27 captures unquantized experts alone, and says nothing of the others."""
    key, _ = read_and_ignored(legacy)
    lines = {key: "R3", FLAG: True, "actor_rollout_ref.rollout.quantization": "ascend"}
    no_engine_installed.append(probe.Product("vllm-ascend", True, "0.23.0", "/somewhere"))
    with pytest.raises(ReplayError, match=r"vllm-ascend 0\.23\.0 gives no routes.*got quantization='ascend'"):
        verl_config.check_actor(with_workers(job(lines), legacy))
    no_engine_installed[-1] = probe.Product("vllm-ascend", True, "0.29.0rc1", "/somewhere")
    verl_config.check_actor(with_workers(job(lines), legacy))


@WORKERS
def test_strict_0_logs_every_problem_once_and_undoes_all_changes(
    legacy: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(import_hook, "_waiting", {"never_there": {"a shim": print}})
    monkeypatch.setattr(patches, "_groups", [])
    target = ModuleType("somebody")
    target.value = 1  # type: ignore[attr-defined]
    Patches("a test").set(target, "value", 2, "to see it undone")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(served_modules, "_served", {})
    served_modules.serve("never.there", print, "to see it withdrawn")
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    key, _ = read_and_ignored(legacy)
    name = next(name for name in UNPADDED if ("megatron" in name) == legacy)
    with caplog.at_level(logging.ERROR):
        verl_config.check_actor(with_workers(job({key: "R3", name: False}), legacy))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert all(record.getMessage().startswith("[npu_replay] verl's config") for record in caplog.records)
    assert target.value == 1
    assert not import_hook._waiting
    assert not served_modules._served
    assert served_modules._finder not in sys.meta_path


# Where it is asked


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checks in verl, and verl as it was afterwards."""
    monkeypatch.setattr(verl_config, "_patches", Patches("a test"))
    verl_config.install()
    yield
    verl_config._patches.undo()
    for waiting in import_hook._waiting.values():
        waiting.pop(verl_config._WHAT, None)


def test_verls_own_check_of_the_config_asks_first(installed: None) -> None:
    from verl.utils.config import validate_config

    ignored = OLD if not HAS_LEGACY else NEW
    with pytest.raises(ReplayError, match="these workers don't read it"):
        validate_config(job({ignored: "R2"}), use_reference_policy=False, use_critic=False)


def workers_module(legacy: bool) -> Any:
    if legacy:
        return pytest.importorskip("verl.workers.megatron_workers")
    return pytest.importorskip("verl.workers.engine_workers")


@WORKERS
@pytest.mark.megatron
def test_a_worker_is_refused_when_it_is_made(
    installed: None, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = workers_module(legacy)
    cls = module.ActorRolloutRefWorker
    monkeypatch.setattr(cls, "__init__", _checked_stand_in(cls.__init__))
    key, ignored = read_and_ignored(legacy)
    wrong, right = (with_workers(job({name: "R2"}), legacy) for name in (ignored, key))
    with pytest.raises(ReplayError, match="don't read it"):
        cls(config=wrong, role="actor_rollout")
    cls(config=wrong, role="rollout")
    cls(config=wrong, role="ref")
    cls(config=right, role="actor")


def _checked_stand_in(checked: Any) -> Any:
    """The check around a constructor without processes and devices: all that it needs is what this sets."""

    def __init__(self: Any, config: Any, role: str) -> None:
        self.config, self.role = config, role

    closure = inspect.getclosurevars(checked).nonlocals
    return verl_config._checked_method(__init__, closure["legacy"], after=True)


@WORKERS
@pytest.mark.megatron
def test_a_worker_that_imports_npu_replay_in_init_model_is_refused_there(
    installed: None, legacy: bool
) -> None:
    cls = workers_module(legacy).ActorRolloutRefWorker
    _, ignored = read_and_ignored(legacy)
    worker = cls.__new__(cls)
    worker.config, worker.role = with_workers(job({ignored: "R2"}), legacy), "actor_rollout"
    called = worker._build_model_optimizer if legacy else worker.set_dispatch_collect
    with pytest.raises(ReplayError, match="don't read it"):
        called("actor")


@WORKERS
@pytest.mark.megatron
def test_a_shim_that_failed_stops_the_worker_of_a_job_that_replays(
    installed: None, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_hook._failures, "another shim", "KeyError: 1")
    cls = workers_module(legacy).ActorRolloutRefWorker
    key, _ = read_and_ignored(legacy)
    for mode in ("disabled", "R2"):
        worker = cls.__new__(cls)
        worker.config, worker.role = with_workers(job({key: mode}), legacy), "actor_rollout"
        if mode == "disabled":
            verl_config._check_worker(worker, legacy)
            continue
        with pytest.raises(ReplayError, match="another shim failed: KeyError: 1"):
            verl_config._check_worker(worker, legacy)


@WORKERS
@pytest.mark.megatron
def test_a_checked_method_keeps_what_verl_registered_with_it(
    legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR

    cls = workers_module(legacy).ActorRolloutRefWorker
    before = {name: getattr(getattr(cls, name), MAGIC_ATTR, None) for name in dir(cls)}
    signature = inspect.signature(cls.__init__)
    monkeypatch.setattr(verl_config, "_patches", Patches("a test"))
    verl_config.install()
    changed = {patch.name for patch in verl_config._patches if patch.owner is cls}
    assert {"__init__", "set_dispatch_collect"} <= changed
    assert {name: getattr(getattr(cls, name), MAGIC_ATTR, None) for name in dir(cls)} == before
    assert inspect.signature(cls.__init__) == signature
    verl_config._patches.undo()
    assert not any("checked" in str(vars(cls).get(name)) for name in changed)
