"""compat.verl.config, on the configs that verl itself composes: what replay would be off or wrong with."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verl
from omegaconf import OmegaConf, open_dict

import npu_replay
from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook, patches
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import config as verl_config
from npu_replay.errors import ReplayError
from on_verl import glm_5_2
from verl_configs import (
    FLAG,
    FSDP,
    HAS_LEGACY,
    NEW,
    OLD,
    UNPADDED,
    engine_workers_replay,
    job,
    read_and_ignored,
)

ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class Workers:
    """One of the two kinds of workers, and the lines that a user may write for them."""

    legacy: bool

    @property
    def lines(self) -> dict[str, Any]:
        key, ignored = read_and_ignored(self.legacy)
        files = {name: key.replace("mode", f"{name}_file") for name in ("record", "replay")}
        unpadded = next(name for name in UNPADDED if ("megatron" in name) == self.legacy)
        named = {"key": key, "ignored": ignored, "unpadded": unpadded, "flag": FLAG}
        return named | files | {"engine": f"{ROLLOUT}.name"}

    def actor(self, **given: Any) -> Any:
        """The actor's part of the config of a job with these workers; `lines` says what a name stands for."""
        config = job({self.lines.get(name, name): value for name, value in given.items()})
        if HAS_LEGACY:
            config.trainer.use_legacy_worker_impl = "auto" if self.legacy else "disable"
        return config.actor_rollout_ref

    def check(self, words: str | None, **given: Any) -> None:
        """Are these lines let through, or refused in these words?"""
        if words is None:
            verl_config.check_actor(self.actor(**given), legacy=self.legacy)
            return
        with pytest.raises(ReplayError, match=f"(?s){words.format(**self.lines)}"):
            verl_config.check_actor(self.actor(**given), legacy=self.legacy)

    @property
    def cls(self) -> Any:
        name = "megatron_workers" if self.legacy else "engine_workers"
        return pytest.importorskip(f"verl.workers.{name}").ActorRolloutRefWorker


@pytest.fixture(
    params=[
        pytest.param(True, id="legacy", marks=pytest.mark.skipif(not HAS_LEGACY, reason="0.7 has them")),
        pytest.param(
            False,
            id="engine",
            marks=pytest.mark.skipif(not engine_workers_replay(), reason="0.7.0's don't replay"),
        ),
    ]
)
def workers(request: pytest.FixtureRequest) -> Workers:
    return Workers(request.param)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[probe.Product]:
    """What `probe` finds; a test adds the rollout engines that it wants."""
    found = [product for product in probe.products() if product.name == "verl"]
    monkeypatch.setattr(probe, "products", lambda: tuple(found))
    return found


@pytest.mark.parametrize("trainer", ["ppo_megatron_trainer", "ppo_trainer"])
def test_a_job_without_replay_is_left_alone(trainer: str) -> None:
    config = job({"actor_rollout_ref.model.use_remove_padding": False}, trainer=trainer)
    verl_config.check_actor(config.actor_rollout_ref)
    assert verl_config.mode_of(config.actor_rollout_ref) == "disabled"


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_right_config_passes_and_its_mode_is_known(workers: Workers, mode: str) -> None:
    """As a plain dict, too."""
    actor = workers.actor(key=mode, flag=mode == "R3")
    for one in (actor, OmegaConf.to_container(actor, resolve=False)):
        verl_config.check_actor(one, legacy=workers.legacy)
        assert verl_config.mode_of(one, legacy=workers.legacy) == mode


def test_a_mode_under_the_key_of_another_release_is_an_error_and_not_silence(workers: Workers) -> None:
    workers.check("{ignored}=R3 is set, and these workers don't read it. Expected {key}=R3", ignored="R3")
    actor = workers.actor(ignored="R3", flag=True)
    assert verl_config.mode_of(actor, legacy=workers.legacy) == "disabled"


BYPASS = {"key": "R2", "algorithm.rollout_correction.bypass_mode": True}
DYNAMIC = {"key": "R2", f"{MEGATRON}.dynamic_context_parallel": True}
STAGES = {f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"key": "R2", "ignored": "R2"}, None),  # both say the same
        ({"key": "R2", "ignored": "R3"}, "{ignored}=R3 is set"),
        ({"key": "R3"}, "Expected {flag}=True, got {flag}=False"),
        # T4, T20
        ({"key": "R2", "flag": True}, "R2 records its own.*Expected {flag}=False, got {flag}=True"),
        (BYPASS, "bypass mode leaves that pass out"),  # T20
        (BYPASS | {"key": "R3", "flag": True}, None),
        ({"key": "R2", "unpadded": False}, "needs packed sequences. Expected {unpadded}=True"),
        ({"key": "R2", f"{MEGATRON}.pad_to_length": True}, r"Expected .*\.pad_to_length=False, got True"),
        (DYNAMIC, None),
        (DYNAMIC | STAGES, "dynamic context parallelism over virtual pipeline"),
        ({"key": "R3", "flag": True, "engine": "ours"}, None),  # a rollout of the user's own
        ({"key": "R3", "flag": True, "engine": "hf"}, "never asks hf for them.*vllm"),
    ],
)
def test_what_replay_would_be_wrong_with_is_refused(
    workers: Workers, given: dict[str, Any], words: str | None
) -> None:
    workers.check(words, **given)


PADDED = {
    "key": "R3",
    "flag": True,
    "unpadded": False,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    f"{MEGATRON}.pad_bshd_to_minibatch_max": False,
}
"""Each micro-batch is one padded sequence."""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"key": "R2", "flag": False}, {}),
        *(
            ({name: value}, {name: right})
            for name, value, right in [
                ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2, 1),
                ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", None, 1),
                (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 4, 1),
                (f"{ROLLOUT}.log_prob_use_dynamic_bsz", True, False),
                (f"{MEGATRON}.pad_bshd_to_minibatch_max", True, False),
                (f"{MEGATRON}.override_transformer_config.fp8", "hybrid", None),
            ]
        ),
        (
            {
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
                f"{MEGATRON}.pad_bshd_to_minibatch_max": True,
            },
            {
                "actor_rollout_ref.actor.use_dynamic_bsz": False,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
                f"{MEGATRON}.pad_bshd_to_minibatch_max": False,
            },
        ),
    ],
)
def test_padded_sequences_are_let_through_where_each_is_a_micro_batch(
    workers: Workers, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """The error names what is missing, and nothing else; the reference's micro-batches don't matter."""
    ref = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4}
    if workers.legacy:
        workers.check(r"needs packed sequences. Expected {unpadded}=True, got False\.", **PADDED)
        return
    if not wanted:
        workers.check(None, **PADDED | ref | given)
        return
    missing = ", ".join(f"{name}={value}" for name, value in wanted.items())
    got = ", ".join(f"{name}={given[name]}" for name in wanted)
    words = f"needs packed sequences. Expected {{unpadded}}=True, or also {missing}, got False, and {got}"
    workers.check(words.replace("[", r"\["), **PADDED | given)


@pytest.mark.skipif(not glm_5_2.is_here(), reason="a script for verl 0.9.1 and later")
def test_verls_own_job_in_padded_sequences_is_let_through(
    engines: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data-parallel engines of vllm-ascend it needs npu_replay's capture, as every job does."""
    has(engines, ASCEND)
    config = glm_5_2.job().actor_rollout_ref
    with pytest.raises(ReplayError, match="under data parallelism"):
        verl_config.check_actor(config)
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "1")
    verl_config.check_actor(config)
    assert verl_config.mode_of(config) == "R3"


def test_t20_bypassed_log_probs_are_refused_in_a_worker_too(workers: Workers) -> None:
    """As the config arrives there: through Ray's pickle."""
    from ray import cloudpickle

    with pytest.raises(ReplayError, match="bypass mode leaves that pass out"):
        actor = cloudpickle.loads(cloudpickle.dumps(workers.actor(**BYPASS)))
        verl_config.check_actor(actor, legacy=workers.legacy)


def test_files_of_routes_are_refused_where_nothing_reads_them(workers: Workers) -> None:
    """verl itself has these keys in every release, and reads them in none."""
    unread = r"these workers don't write or read routes.*use_legacy" if workers.legacy else None
    workers.check(unread, key="R2", record="/routes")
    workers.check(unread, key="R3", replay="/routes")
    anew = r"R2 records anew, and .*replay_file asks for a replay"
    workers.check(unread or anew, key="R2", replay="/routes")


def test_delivery_is_refused_where_batches_carry_ids(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_REPLAY_DELIVERY", "ray")
    workers.check(r"nor keep any out of the batch.*'ray'" if workers.legacy else None, key="R2")


@pytest.mark.skipif(engine_workers_replay(), reason="0.7.0's engine workers know no replay")
def test_engine_workers_that_know_no_replay_are_named() -> None:
    Workers(False).check(r"these workers know no replay.*legacy workers alone", **{OLD: "R2"})


def fsdp_actor(given: dict[str, Any], *, legacy: bool = False, strategy: str = "fsdp2") -> Any:
    """The actor's part of the config of an FSDP job, packed sequences or not."""
    config = job({"actor_rollout_ref.actor.strategy": strategy} | given, trainer="ppo_trainer")
    if HAS_LEGACY:
        config.trainer.use_legacy_worker_impl = "auto" if legacy else "disable"
    return config.actor_rollout_ref


needs_engines = pytest.mark.skipif(not engine_workers_replay(), reason="0.7.0's know no replay")


@needs_engines
@pytest.mark.parametrize(("strategy", "mode"), [("fsdp", "R2"), ("fsdp2", "R3")])
def test_an_fsdp_job_has_its_mode_beside_its_engines_settings(strategy: str, mode: str) -> None:
    """verl's yaml has no such key there, so it is a plain dict; padded sequences will do."""
    lines = {FSDP: mode, FLAG: mode == "R3", "actor_rollout_ref.model.use_remove_padding": False}
    typed = {FSDP.replace(".mode", "._target_"): "verl.workers.config.EngineRouterReplayConfig"}
    for one in (lines, lines | typed):
        actor = fsdp_actor(one, strategy=strategy)
        verl_config.check_actor(actor)
        assert verl_config.mode_of(actor) == mode
    assert verl_config.mode_of(fsdp_actor({})) == "disabled"


REF = FSDP.replace("actor.", "ref.")
SLIP = "nothing reads it. Expected actor_rollout_ref.*"


@needs_engines
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({OLD: "R2"}, rf"these workers don't read it. Expected {FSDP}=R2, got .*Set \+{FSDP}=R2"),
        ({NEW: "R2"}, rf"these workers don't read it. Expected {FSDP}=R2"),
        ({FSDP: "R3"}, f"Expected {FLAG}=True"),
        ({FSDP: "r2"}, "there is no mode r2"),
        ({REF: "R2"}, rf"\.ref\.fsdp_config.*Expected {FSDP}=R2"),
        ({FSDP: "R2", REF: "R2"}, None),
        ({FSDP: "R2", "algorithm.rollout_correction.bypass_mode": True}, "leaves that pass out"),
        ({FSDP: "R2", FSDP.replace("mode", "replay_file"): "/routes"}, "records anew"),
        ({FSDP: "R3", FSDP.replace("mode", "replay_file"): "/routes"}, None),
        ({FSDP.replace("router_replay", "router_replya"): "R2"}, f"{SLIP}fsdp_config.router_replay, got"),
        ({FSDP.replace("router_replay", "routing_replay"): "R2"}, f"{SLIP}fsdp_config.router_replay, got"),
        ({FSDP.replace("mode", "moed"): "R2"}, f"{SLIP}fsdp_config.router_replay.mode, got"),
        ({"actor_rollout_ref.actor.router_reply.mode": "R2"}, f"{SLIP}actor.router_replay, got"),
    ],
)
def test_what_an_fsdp_job_would_be_wrong_with_is_refused(given: dict[str, Any], words: str | None) -> None:
    """A slip in a key is an error, and not silence."""
    if words is None:
        verl_config.check_actor(fsdp_actor(given))
        return
    with pytest.raises(ReplayError, match=words):
        verl_config.check_actor(fsdp_actor(given))


@needs_engines
@pytest.mark.parametrize(
    ("section", "strategy"),
    [("fsdp_config.", "fsdp2"), ("", "megatron"), ("megatron.", "megatron"), ("veomni.", "fsdp2")],
)
def test_a_mode_without_its_key_is_an_error_and_not_silence(section: str, strategy: str) -> None:
    key = f"actor_rollout_ref.actor.{section}router_replay"
    actor = fsdp_actor({}, strategy=strategy)
    with open_dict(actor):
        OmegaConf.update(actor, f"actor.{section}router_replay", "R2", force_add=True)
    with pytest.raises(ReplayError, match=rf"no section.*Expected {key}.mode=R2 .*got {key}=R2"):
        verl_config.check_actor(actor)


@needs_engines
@pytest.mark.parametrize("key", [OLD, FSDP])
def test_fsdp_turbo_is_refused_by_name(key: str) -> None:
    with pytest.raises(ReplayError, match=r"actor.strategy=fsdp_turbo.*fsdp_turbo cuts its batches"):
        verl_config.check_actor(fsdp_actor({key: "R2"}, strategy="fsdp_turbo"))


@pytest.mark.skipif(HAS_LEGACY, reason="0.7's VeOmni knows no replay")
def test_veomnis_own_replay_is_left_to_it() -> None:
    lines = {"actor_rollout_ref.actor.veomni.router_replay.mode": "R2"}
    actor = job(lines, trainer="_generated_ppo_veomni_trainer").actor_rollout_ref
    verl_config.check_actor(actor)
    assert verl_config.mode_of(actor) == "disabled"


@pytest.mark.skipif(not HAS_LEGACY, reason="0.7 has them")
@pytest.mark.parametrize("key", [OLD, NEW, FSDP])
def test_legacy_workers_with_fsdp_are_refused_and_the_others_asked_for(key: str) -> None:
    with pytest.raises(ReplayError, match=r"know no replay.*use_legacy_worker_impl=disable.*fsdp_config"):
        verl_config.check_actor(fsdp_actor({key: "R2"}, legacy=True), legacy=True)


def test_r3_with_trtllm_is_refused_where_verl_never_asks_it_for_routes(workers: Workers) -> None:
    if not (Path(verl.__path__[0]) / "workers" / "rollout" / "trtllm_rollout").is_dir():
        pytest.skip("this verl has no trtllm")
    workers.check(r"never asks trtllm for them.*vllm", key="R3", flag=True, engine="trtllm")


NO_ASYNC = "no_async_scheduling"
KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"
ASCEND = {"vllm-ascend": "0.23.0", "vllm": "0.23.0"}
R3 = {"key": "R3", "flag": True}
CAPTURES = {"NPU_REPLAY_VLLM_ASCEND": "1"}
QUANTIZED = {f"{ROLLOUT}.quantization": "ascend"}
CANN = r"vllm-ascend 0\.13\.0 is older than.*Expected 0\.18\.0 and later.*nobody checks.*R2 needs no"
Found = list[probe.Product]


def has(engines: Found, found: dict[str, str]) -> None:
    engines.extend(probe.Product(name, True, version, "/somewhere") for name, version in found.items())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"vllm": "0.17.1+empty"}, "vLLM 0.17.1.empty is older than"),
        ({"vllm": "0.18.0"}, None),
        ({"vllm-ascend": "0.13.0", "vllm": "0.14.1", "torch_npu": "2.7.1"}, CANN),
        ({"vllm-ascend": "0.18.0rc1"}, None),
        ({"sglang": "0.5.7"}, "SGLang 0.5.7 is older than"),
        ({"sglang": "0.5.8"}, None),
        ({"sglang": "0.5.8", "torch_npu": "2.7.1"}, "SGLang 0.5.8 returns zeros on an NPU"),
    ],
)
def test_r3_with_a_release_of_the_engine_that_gives_no_routes_is_refused(
    workers: Workers, engines: Found, found: dict[str, str], words: str | None
) -> None:
    if "sglang" in found and not engine_workers_replay():
        pytest.skip("0.7.0 never asks SGLang at all")
    has(engines, found)
    engine = {"engine": "sglang" if "sglang" in found else "vllm"}
    workers.check(words, **R3, **engine, **{f"{KWARGS}.{NO_ASYNC}": True})
    workers.check(None, key="R2", **engine)


@pytest.mark.parametrize(
    ("found", "late"),
    [
        ({"vllm": "0.20.2"}, True),
        ({"vllm": "0.22.0"}, False),
        ({"vllm-ascend": "0.22.1rc1", "vllm": "0.22.1"}, True),
        ({"vllm-ascend": "0.23.0.dev45", "vllm": "0.22.1"}, True),  # has the rules of its vLLM
        (ASCEND, False),
        ({}, False),
    ],
)
def test_rows_of_another_step_are_refused_with_the_key_that_verl_hands_on(
    workers: Workers, engines: Found, found: dict[str, str], late: bool
) -> None:
    has(engines, found)
    words = rf"asynchronous scheduling.*Expected \+{KWARGS}\.{NO_ASYNC}=True, got async_scheduling="
    workers.check(words if late else None, **R3)
    workers.check(words if late else None, **R3, **{f"{KWARGS}.async_scheduling": False})  # verl drops it
    workers.check(None, **R3, **{f"{KWARGS}.{NO_ASYNC}": True})
    workers.check(None, **R3, **{f"{KWARGS}.no-async-scheduling": True})
    workers.check(None, key="R2")


@pytest.mark.parametrize(
    ("found", "environment", "given", "says"),
    [
        # vllm-ascend before 0.27 captures unquantized experts alone, and says nothing of the others
        (ASCEND, {}, QUANTIZED, f"got {ROLLOUT}.quantization='ascend'"),
        ({"vllm-ascend": "0.29.0rc1", "vllm": "0.29.0"}, {}, QUANTIZED, None),
        (ASCEND, CAPTURES, QUANTIZED, None),
        (
            ASCEND,
            CAPTURES | {"VLLM_PLUGINS": "ascend"},
            QUANTIZED,
            "VLLM_PLUGINS=ascend leaves",
        ),
        (ASCEND, CAPTURES | {"NPU_REPLAY_DISABLE": "1"}, QUANTIZED, "rollout.quantization='ascend'"),
        (ASCEND | {"vllm": "0.24.0"}, CAPTURES, {}, "Expected the vLLM that it is made for, got 0.24.0"),
        # sizes may be text or none
        (ASCEND, {}, {f"{ROLLOUT}.data_parallel_size": "1"}, None),
        (ASCEND, {}, {f"{ROLLOUT}.data_parallel_size": None}, None),
        (ASCEND, {}, {f"{ROLLOUT}.data_parallel_size": "2"}, f"got {ROLLOUT}.data_parallel"),
    ],
)
def test_a_rollout_on_ascend_is_refused_where_it_gives_zeros(
    workers: Workers,
    engines: Found,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, str],
    environment: dict[str, str],
    given: dict[str, Any],
    says: str | None,
) -> None:
    has(engines, found)
    for name in (*CAPTURES, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sizes = {f"{ROLLOUT}.{name}": "4" for name in ("tensor_model_parallel_size", "expert_parallel_size")}
    workers.check(says and f"{says}.*R2 needs no routes", **R3, **sizes, **given)


SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("engine", "version", "given", "key"),
    [
        ("sglang", "0.5.23", {f"{SGLANG}.enable_hierarchical_cache": True}, "enable_hierarchical_cache"),
        ("sglang", "0.5.23", {f"{SGLANG}.speculative_algorithm": "NGRAM"}, "speculative_algorithm"),
        ("sglang", "0.5.23", {f"{SGLANG}.enable_two_batch_overlap": True}, "enable_two_batch_overlap"),
        ("sglang", "0.5.23", {f"{SGLANG}.tp-size": 4, f"{SGLANG}.pp-size": "2"}, "pp-size"),
        ("vllm", "0.23.0", {f"{KWARGS}.speculative_config": MTP}, "speculative_config"),
        ("vllm", "0.23.0", {f"{KWARGS}.enable_dbo": True}, "enable_dbo"),
        ("vllm", "0.23.0", {f"{KWARGS}.kv_transfer_config": {"kv_connector": "x"}}, "kv_transfer_config"),
        ("vllm", "0.26.0", {f"{KWARGS}.moe_backend": "flashinfer_trtllm"}, "moe_backend"),
        ("vllm", "0.33.0", {f"{ROLLOUT}.enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_an_engines_plan_is_refused_by_verls_key(
    workers: Workers, engines: Found, engine: str, version: str, given: dict[str, Any], key: str
) -> None:
    """Its own, or the engine's own beside them; R2 asks no engine."""
    if engine == "sglang" and not engine_workers_replay():
        pytest.skip("0.7.0 never asks SGLang at all")
    has(engines, {engine: version})
    where = next(name for name in given if name.endswith(key)).replace(".", r"\.")
    workers.check(rf"with this {where}\. .*got {where}=.*R2 needs no routes", **R3, engine=engine, **given)
    workers.check(None, **R3, engine=engine)
    workers.check(None, key="R2", engine=engine, **given)


@pytest.mark.parametrize(
    ("engine", "version", "given"),
    [
        ("sglang", "0.5.23", {f"{SGLANG}.attention_backend": "fa3", f"{SGLANG}.enable_mixed_chunk": "true"}),
        ("sglang", "0.5.23", {f"{SGLANG}.speculative_algorithm": "EAGLE", f"{SGLANG}.enable_eplb": False}),
        ("vllm", "0.23.0", {f"{KWARGS}.enable_dbo": False, f"{KWARGS}.ubatch_size": 0}),
        ("vllm", "0.33.0", {f"{KWARGS}.kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'}),
        ("vllm", "0.26.0", {f"{KWARGS}.speculative_config": MTP, f"{ROLLOUT}.expert_parallel_size": 2}),
    ],
)
def test_a_right_plan_of_an_engine_is_let_through(
    workers: Workers, engines: Found, engine: str, version: str, given: dict[str, Any]
) -> None:
    if engine == "sglang" and not engine_workers_replay():
        pytest.skip("0.7.0 never asks SGLang at all")
    has(engines, {engine: version})
    workers.check(None, **R3, engine=engine, **given)


def test_strict_0_logs_every_problem_once_and_undoes_all_changes(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(import_hook, "_waiting", {"never_there": {"a shim": print}})
    monkeypatch.setattr(patches, "_groups", [])
    target = ModuleType("somebody")
    target.value = 1  # type: ignore[attr-defined]
    Patches("a test").set(target, "value", 2, "to see it undone")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(import_hook, "_served", {})
    import_hook.serve("never.there", print, "to see it withdrawn")
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    with caplog.at_level(logging.ERROR):
        workers.check(None, key="R3", unpadded=False)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert target.value == 1
    assert not import_hook._waiting
    assert not import_hook._served
    assert import_hook._finder not in sys.meta_path


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


def made(workers: Workers, **given: Any) -> Any:
    """A worker whose constructor hasn't run."""
    worker = workers.cls.__new__(workers.cls)
    worker.config = workers.actor(**given)
    worker.role = "actor_rollout"
    return worker


@pytest.mark.megatron
def test_a_worker_is_refused_when_it_is_made_or_in_init_model(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Where npu_replay is imported in init_model, its constructor is over."""

    def bare(self: Any, config: Any, role: str) -> None:
        """A constructor without processes and devices: it sets all that the check needs."""
        self.config = config
        self.role = role

    monkeypatch.setattr(workers.cls, "__init__", bare)
    request.getfixturevalue("installed")
    wrong = workers.actor(ignored="R2")
    right = workers.actor(key="R2")
    with pytest.raises(ReplayError, match="don't read it"):
        workers.cls(config=wrong, role="actor_rollout")
    workers.cls(config=wrong, role="rollout")
    workers.cls(config=wrong, role="ref")
    workers.cls(config=right, role="actor")
    worker = made(workers, ignored="R2")
    called = worker._build_model_optimizer if workers.legacy else worker.set_dispatch_collect
    with pytest.raises(ReplayError, match="don't read it"):
        called("actor")


@pytest.mark.megatron
@pytest.mark.parametrize(("rank", "says"), [("0", True), ("3", False), ("8", True), ("9", False)])
def test_one_rank_of_each_node_says_that_replay_is_asked_for_and_how_to_turn_it_off(
    installed: None,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: str,
    says: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "8")
    verl_config._say_asked.cache_clear()
    with caplog.at_level(logging.INFO, "npu_replay.job"):
        verl_config._check_worker(made(workers, key="disabled"), workers.legacy)
        assert not caplog.records, "a job that doesn't ask"
        for _ in range(2):  # a process may build several workers
            verl_config._check_worker(made(workers, key="R2"), workers.legacy)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == says
    for line in lines:
        assert f"[npu_replay] {npu_replay.__version__}: R2 is asked for on rank {rank}; attached: " in line
        assert "a test" in line, "what is attached"
        assert "NPU_REPLAY_DISABLE=1" in line


@pytest.mark.megatron
def test_a_shim_that_failed_stops_the_worker_of_a_job_that_replays(
    installed: None, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_hook._failures, "another shim", "KeyError: 1")
    verl_config._check_worker(made(workers, key="disabled"), workers.legacy)
    with pytest.raises(ReplayError, match="another shim failed: KeyError: 1"):
        verl_config._check_worker(made(workers, key="R2"), workers.legacy)
