"""compat.verl.config, on the configs that verl itself composes: what replay would be off or wrong with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray import cloudpickle

import npu_replay
from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl import config as verl_config
from npu_replay.errors import ReplayError
from verl_configs import (
    CONFIGS,
    FLAG,
    FSDP,
    HAS_LEGACY,
    NEW,
    OLD,
    PADS_TO_MINI_BATCH,
    UNPADDED,
    job,
    overridden,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
ROOT = "actor_rollout_ref"
HAS_METRICS = "moe_load_balance_metrics_interval" in (CONFIGS / "rollout" / "rollout.yaml").read_text("utf-8")
TRTLLM = (CONFIGS.parents[1] / "workers" / "rollout" / "trtllm_rollout").is_dir()


@dataclass(frozen=True)
class Workers:
    """One kind of workers, and the lines that a user may write for them."""

    legacy: bool = False
    strategy: str = "megatron"

    @property
    def lines(self) -> dict[str, str]:
        """What a name in a row of the table stands for."""
        key = OLD if self.legacy else NEW
        if self.strategy != "megatron":
            key = FSDP
        files = {name: key.replace("mode", f"{name}_file") for name in ("record", "replay")}
        unpadded = next(name for name in UNPADDED if ("megatron" in name) == self.legacy)
        named = {"key": key, "ignored": NEW if key == OLD else OLD, "unpadded": unpadded, "flag": FLAG}
        return named | files | {"engine": f"{ROLLOUT}.name"}

    def actor(self, **settings: Any) -> Any:
        """The actor's part of the config of a job with these workers, as it arrives there: through Ray's
        pickle."""
        lines = {self.lines.get(name, name): value for name, value in settings.items()}
        trainer = "ppo_megatron_trainer" if self.strategy == "megatron" else "ppo_trainer"
        config = job({f"{ACTOR}.strategy": self.strategy} | lines, trainer=trainer)
        if HAS_LEGACY:
            config.trainer.use_legacy_worker_impl = "auto" if self.legacy else "disable"
        return cloudpickle.loads(cloudpickle.dumps(config.actor_rollout_ref))

    def check(self, words: str | None, **settings: Any) -> None:
        """Are these lines let through, or refused in these words?"""
        if words is None:
            verl_config.check_actor(self.actor(**settings), legacy=self.legacy)
            return
        with pytest.raises(ReplayError, match=f"(?s){words.format(**self.lines)}"):
            verl_config.check_actor(self.actor(**settings), legacy=self.legacy)

    @property
    def cls(self) -> Any:
        name = "megatron_workers" if self.legacy else "engine_workers"
        return pytest.importorskip(f"verl.workers.{name}").ActorRolloutRefWorker


KINDS = {
    "legacy": Workers(legacy=True),
    "engine": Workers(),
    "fsdp2": Workers(strategy="fsdp2"),
    "fsdp_turbo": Workers(strategy="fsdp_turbo"),
    "legacy fsdp2": Workers(legacy=True, strategy="fsdp2"),
}
HERE = {name: HAS_LEGACY or not kind.legacy for name, kind in KINDS.items()}
"""0.7 has legacy workers, too."""
ON_MEGATRON = ("legacy", "engine")
THAT_REPLAY = (*ON_MEGATRON, "fsdp2")


def kinds(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(KINDS[name], id=name) for name in names if HERE[name]]


@pytest.fixture(params=kinds(ON_MEGATRON))
def workers(request: pytest.FixtureRequest) -> Workers:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[probe.Product]:
    """What `probe` finds; a test adds the rollout engines that it wants."""
    products = [product for product in probe.products() if product.name == "verl"]
    monkeypatch.setattr(probe, "products", lambda: tuple(products))
    return products


def has(engines: list[probe.Product], versions: Mapping[str, str]) -> None:
    engines.extend(probe.Product(name, True, version, "/somewhere") for name, version in versions.items())


def as_dataclasses(section: Any) -> Any:
    """A section as a worker of one's own may have it: plain dataclasses."""
    if not isinstance(section, dict):
        return section
    fields = {str(name): as_dataclasses(value) for name, value in section.items()}
    return make_dataclass("Section", fields)(**fields)


def test_a_config_of_dataclasses_is_searched_too() -> None:
    workers = KINDS["engine"]
    config = OmegaConf.to_container(workers.actor(**{FSDP: "R3"}), resolve=True)
    with pytest.raises(ReplayError, match=r"fsdp_config.*don't read it"):
        verl_config.check_actor(as_dataclasses(config))


VEOMNI = {f"{ACTOR}.veomni.router_replay.mode": "R2"}


@pytest.mark.parametrize(
    ("trainer", "lines"),
    [
        ("ppo_megatron_trainer", {"actor_rollout_ref.model.use_remove_padding": False}),
        ("ppo_trainer", {}),
        ("_generated_ppo_veomni_trainer", VEOMNI),  # VeOmni's own replay is left to it
    ],
)
def test_a_job_without_replay_is_left_alone(trainer: str, lines: dict[str, Any]) -> None:
    if "veomni" in trainer and HAS_LEGACY:
        pytest.skip("0.7's VeOmni knows no replay")
    config = job(lines, trainer=trainer)
    assert verl_config.check_actor(config.actor_rollout_ref) == "disabled"


@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("kind", kinds(THAT_REPLAY))
def test_a_right_config_passes_and_its_mode_is_known(kind: Workers, mode: str) -> None:
    """As a plain dict and with verl's dataclass, too; on FSDP, where verl's yaml has no such key, as well."""
    typed = {FSDP.replace(".mode", "._target_"): "verl.workers.config.EngineRouterReplayConfig"}
    lines = {"key": mode, "flag": mode == "R3"}
    actors = [kind.actor(**lines), kind.actor(**lines | (typed if kind.strategy == "fsdp2" else {}))]
    for actor in (*actors, OmegaConf.to_container(actors[0], resolve=False)):
        assert verl_config.check_actor(actor, legacy=kind.legacy) == mode


@dataclass(frozen=True)
class Row:
    """Lines of a job, and in which words they are refused, if they are.

    Attributes:
        kinds: of the workers; all that replay if not said.
        found: the rollout engines of the machine.
    """

    given: dict[str, Any]
    words: str | None
    kinds: tuple[str, ...] = THAT_REPLAY
    found: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


METRICS = f"{ROLLOUT}.moe_load_balance_metrics_interval"
R2 = {"key": "R2"}
R3 = {"key": "R3", "flag": True}
BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
DYNAMIC = {**R2, f"{MEGATRON}.dynamic_context_parallel": True}
STAGES = {f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2}
REF = FSDP.replace("actor.", "ref.")
SLIP = "nothing reads it. Expected actor_rollout_ref.*"
BY_RAY = {"NPU_REPLAY_DELIVERY": "ray"}
UNREAD = r"these workers don't write or read routes.*use_legacy"
SETTINGS = [
    Row({"ignored": "R3"}, r"{ignored}=R3 is set, and these workers don't read it. Expected {key}=R3"),
    Row({**R2, "ignored": "R2"}, None),  # both say the same
    Row({**R2, "ignored": "R3"}, "{ignored}=R3 is set"),
    Row({NEW: "R2"}, rf"don't read it. Expected {FSDP}=R2, got .*Set \+{FSDP}=R2", ("fsdp2",)),
    Row({"key": "R3"}, "Expected {flag}=True, got {flag}=False"),
    Row({"key": "r2"}, "there is no mode r2"),
    Row({"flag": True}, r"{flag}=True asks the rollout for routes.*Expected .*{key}=R3; or {flag}=False"),
    *([Row({"flag": True, METRICS: 5}, None)] * HAS_METRICS),
    # a mode in a place that no release reads
    *(
        Row({f"{place}.router_replay.mode": "R2"}, rf"{place}\.router_replay\.mode=R2 is set, and")
        for place in (ROOT, ROLLOUT, f"{ROOT}.model", f"{ACTOR}.engine", f"{ACTOR}.fsdp2_config")
    ),
    Row({f"{ROLLOUT}.router_replay": "R3"}, rf"{ROLLOUT}\.router_replay sets no mode"),
    Row({**R2, "flag": True}, "R2 records its own.*Expected {flag}=False, got {flag}=True"),  # T4, T20
    Row(R2 | BYPASS, "bypass mode leaves that pass out"),  # T20
    Row(R3 | BYPASS, None),
    Row({**R2, "unpadded": False}, "needs packed sequences. Expected {unpadded}=True", ON_MEGATRON),
    Row(
        {**R2, f"{MEGATRON}.pad_to_length": True}, r"Expected .*\.pad_to_length=False, got True", ON_MEGATRON
    ),
    Row(DYNAMIC, None, ON_MEGATRON),
    Row(DYNAMIC | STAGES, "dynamic context parallelism over virtual pipeline", ON_MEGATRON),
    Row({**R3, "engine": "ours"}, None),  # a rollout of the user's own
    Row({**R3, "engine": "hf"}, "never asks hf for them.*vllm"),
    *([Row({**R3, "engine": "trtllm"}, "never asks trtllm for them.*vllm")] * TRTLLM),
    # verl itself has these keys in every release, and reads them in none.
    Row({**R2, "record": "/routes"}, UNREAD, ("legacy",)),
    Row({"key": "R3", "replay": "/routes"}, UNREAD, ("legacy",)),
    Row({**R2, "record": "/routes"}, None, ("engine", "fsdp2")),
    Row({"key": "R3", "replay": "/routes"}, None, ("engine", "fsdp2")),
    Row(
        {**R2, "replay": "/routes"},
        "R2 records anew, and .*replay_file asks for a replay",
        ("engine", "fsdp2"),
    ),
    Row(R2, "nor keep any out of the batch.*got ray", ("legacy",), environment=BY_RAY),
    Row(R2, None, ("engine",), environment=BY_RAY),
    Row({REF: "R2"}, rf"\.ref\.fsdp_config.*Expected {FSDP}=R2", ("fsdp2",)),
    Row({**R2, REF: "R2"}, None, ("fsdp2",)),
    # A slip in a key is an error, and not silence.
    Row(
        {**R2, FSDP.replace("mode", "record_fil"): "x"}, rf"{SLIP}router_replay\.record_file, got", ("fsdp2",)
    ),
    *(
        Row({FSDP.replace(right, wrong): "R2"}, f"{SLIP}{meant}, got", ("fsdp2",))
        for right, wrong, meant in (
            ("router_replay", "router_replya", "fsdp_config.router_replay"),
            ("router_replay", "routing_replay", "fsdp_config.router_replay"),
            ("mode", "moed", "fsdp_config.router_replay.mode"),
            ("fsdp_config.router_replay", "router_reply", "actor.router_replay"),
        )
    ),
    *(
        Row(
            {f"{ACTOR}.{section}router_replay": "R2"},
            rf"no mode.*Expected {ACTOR}.{section}router_replay.mode=R2 .*got {ACTOR}.{section}router_rep",
            (kind,),
        )
        for section, kind in (
            ("fsdp_config.", "fsdp2"),
            ("", "engine"),
            ("megatron.", "engine"),
            ("veomni.", "fsdp2"),
        )
    ),
    *(
        Row({key: "R2"}, "actor.strategy=fsdp_turbo.*fsdp_turbo cuts its batches", ("fsdp_turbo",))
        for key in (OLD, FSDP)
    ),
    *(
        Row({key: "R2"}, "know no replay.*use_legacy_worker_impl=disable.*fsdp_config", ("legacy fsdp2",))
        for key in (OLD, NEW, FSDP)
    ),
]

PADDED = {
    **R3,
    "unpadded": False,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{MEGATRON}.pad_bshd_to_minibatch_max": False,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,  # the reference's don't matter
}
"""Each micro-batch is one padded sequence."""


def lacking(wrong: dict[str, Any], right: dict[str, Any]) -> Row:
    """A padded job in which these settings are wrong: the error names them, and nothing else."""
    instead, got = (
        ", ".join(f"{name}={value}" for name, value in settings.items()) for settings in (right, wrong)
    )
    words = f"needs packed sequences. Expected {{unpadded}}=True, or also {instead}, got False, and {got}"
    return Row(PADDED | wrong, words, ("engine",))


SEQUENCES = [
    Row(PADDED, r"needs packed sequences. Expected {unpadded}=True, got False\.", ("legacy",)),
    Row(PADDED, None, ("engine",)),
    Row({**PADDED, "key": "R2", "flag": False}, None, ("engine",)),
    *(
        lacking({name: value}, {name: right})
        for name, value, right in [
            (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, 1),
            (f"{ACTOR}.ppo_micro_batch_size_per_gpu", None, 1),
            (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 4, 1),
            (f"{MEGATRON}.override_transformer_config.fp8", "hybrid", None),
        ]
    ),
    lacking(
        *(
            {
                f"{ACTOR}.use_dynamic_bsz": value,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": value,
                f"{MEGATRON}.pad_bshd_to_minibatch_max": value,
            }
            for value in (True, False)
        )
    ),
]

KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
NO_ASYNC = {f"{KWARGS}.no_async_scheduling": True}
LATE = rf"asynchronous scheduling.*Expected \+{KWARGS}\.no_async_scheduling=True, got async_scheduling="
ASCEND = {"vllm-ascend": "0.23.0", "vllm": "0.23.0"}
CAPTURES = {"NPU_REPLAY_VLLM_ASCEND": "on"}
QUANTIZED = {f"{ROLLOUT}.quantization": "ascend"}
SIZES = {f"{ROLLOUT}.{name}": "4" for name in ("tensor_model_parallel_size", "expert_parallel_size")}
CANN = r"vllm-ascend 0\.13\.0 is older than.*Expected 0\.18\.0 and later.*nobody checks.*R2 needs no"
MTP = {"method": "mtp", "num_speculative_tokens": 1}


def started(
    versions: dict[str, str],
    settings: dict[str, Any],
    words: str | None,
    environment: Mapping[str, str] | None = None,
) -> Row:
    """R3 with this engine."""
    engine = {"engine": "sglang" if "sglang" in versions else "vllm"}
    return Row(R3 | engine | settings, words, ON_MEGATRON, versions, environment or {})


ENGINES = [
    # a release that gives no routes
    started({"vllm": "0.17.1+empty"}, {}, "vLLM 0.17.1.empty is older than"),
    started({"vllm": "0.18.0"}, NO_ASYNC, None),
    started({"vllm-ascend": "0.13.0", "vllm": "0.14.1", "torch_npu": "2.7.1"}, NO_ASYNC, CANN),
    started({"vllm-ascend": "0.18.0rc1"}, NO_ASYNC, None),
    started({"sglang": "0.5.7"}, {}, "SGLang 0.5.7 is older than"),
    started({"sglang": "0.5.8"}, {}, None),
    started({"sglang": "0.5.8", "torch_npu": "2.7.1"}, {}, "SGLang 0.5.8 returns zeros on an NPU"),
    # rows of another step, by the key that verl hands on
    *(
        started(versions, settings, words)
        for versions in ({"vllm": "0.20.2"}, {"vllm-ascend": "0.22.1rc1", "vllm": "0.22.1"})
        for settings, words in (
            ({}, LATE),
            ({f"{KWARGS}.async_scheduling": False}, LATE),  # verl drops it
            ({f"{KWARGS}.async-scheduling": False}, LATE),
            ({f"{KWARGS}.async_scheduling": "False"}, LATE),
            (NO_ASYNC, None),
            ({f"{KWARGS}.no-async-scheduling": True}, None),
        )
    ),
    started({"vllm-ascend": "0.23.0.dev45", "vllm": "0.22.1"}, {}, LATE),  # has the rules of its vLLM
    *(started(versions, {}, None) for versions in ({"vllm": "0.22.0"}, ASCEND, {})),
    # zeros on Ascend: vllm-ascend before 0.27 captures unquantized experts alone, and says nothing of others
    started(ASCEND, SIZES | QUANTIZED, f"got {ROLLOUT}.quantization='ascend'.*R2 needs no routes"),
    started({"vllm-ascend": "0.29.0rc1", "vllm": "0.29.0"}, SIZES | QUANTIZED, None),
    started(ASCEND, SIZES | QUANTIZED, None, CAPTURES),
    started(ASCEND, QUANTIZED, "VLLM_PLUGINS=ascend leaves", CAPTURES | {"VLLM_PLUGINS": "ascend"}),
    started(ASCEND, QUANTIZED, "quantization='ascend'", CAPTURES | {"NPU_REPLAY_DISABLE": "1"}),
    started(
        ASCEND | {"vllm": "0.24.0"}, SIZES, "Expected the vLLM that it is made for, got 0.24.0", CAPTURES
    ),
    *(started(ASCEND, SIZES | {f"{ROLLOUT}.data_parallel_size": size}, None) for size in ("1", None)),
    started(ASCEND, {f"{ROLLOUT}.data_parallel_size": "2"}, f"got {ROLLOUT}.data_parallel"),
    # its plan: verl's own keys, or the engine's own beside them
    *(
        started(
            {engine: version},
            settings,
            rf"with this {[*settings][-1]}\. .*got {[*settings][-1]}=.*R2 needs no routes",
        )
        for engine, version, settings in [
            ("sglang", "0.5.23", {f"{SGLANG}.enable_hierarchical_cache": True}),
            ("sglang", "0.5.23", {f"{SGLANG}.speculative_algorithm": "NGRAM"}),
            ("sglang", "0.5.23", {f"{SGLANG}.tp-size": 4, f"{SGLANG}.pp-size": "2"}),
            ("vllm", "0.23.0", {f"{KWARGS}.speculative_config": MTP}),
            ("vllm", "0.23.0", {f"{KWARGS}.kv_transfer_config": {"kv_connector": "x"}}),
            ("vllm", "0.26.0", {f"{KWARGS}.moe_backend": "flashinfer_trtllm"}),
            ("vllm", "0.33.0", {f"{ROLLOUT}.enable_prefix_caching": False}),
        ]
    ),
    *(
        started({engine: version}, settings, None)
        for engine, version, settings in [
            (
                "sglang",
                "0.5.23",
                {f"{SGLANG}.attention_backend": "fa3", f"{SGLANG}.enable_mixed_chunk": "true"},
            ),
            (
                "sglang",
                "0.5.23",
                {f"{SGLANG}.speculative_algorithm": "EAGLE", f"{SGLANG}.enable_eplb": False},
            ),
            ("vllm", "0.23.0", {f"{KWARGS}.enable_dbo": False, f"{KWARGS}.ubatch_size": 0}),
            ("vllm", "0.33.0", {f"{KWARGS}.kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'}),
            ("vllm", "0.26.0", {f"{KWARGS}.speculative_config": MTP, f"{ROLLOUT}.expert_parallel_size": 2}),
        ]
    ),
]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        pytest.param(KINDS[name], row, id=f"{name}-{row.words}", marks=marks)
        for rows, marks in (([*SETTINGS, *SEQUENCES], []), (ENGINES, [pytest.mark.newest]))
        for row in rows
        for name in row.kinds
        if HERE[name]
    ],
)
def test_what_replay_would_be_off_or_wrong_with_is_refused_and_nothing_else(
    kind: Workers, row: Row, engines: list[probe.Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2 asks no engine, so none is in its way."""
    for name in ("NPU_REPLAY_VLLM_ASCEND", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    has(engines, row.found)
    kind.check(row.words, **row.given)
    if row.found and row.words is not None:
        kind.check(None, **row.given | {"key": "R2", "flag": False})


OVERRIDE = f"+{MEGATRON}.override_transformer_config"
GLM_5_2 = [
    "data.train_batch_size=0",
    "data.max_prompt_length=2048",
    "data.max_response_length=32768",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.use_fused_kernels=False",
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.98_1.02",
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ACTOR}.use_dynamic_bsz=False",
    f"{ACTOR}.ppo_max_token_len_per_gpu=34816",
    f"{ACTOR}.use_rollout_log_probs=True",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    f"{ACTOR}.policy_loss.loss_mode=gspo",
    f"{ACTOR}.megatron.use_remove_padding=False",
    f"{ACTOR}.megatron.pad_bshd_to_minibatch_max=False",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=8",
    f"{ACTOR}.megatron.tensor_model_parallel_size=4",
    f"{ACTOR}.megatron.context_parallel_size=4",
    f"{ACTOR}.megatron.expert_model_parallel_size=32",
    f"{ACTOR}.megatron.expert_tensor_parallel_size=1",
    f"{ACTOR}.megatron.router_replay.mode=R3",
    f"{OVERRIDE}.recompute_method=uniform",
    f"{OVERRIDE}.recompute_granularity=full",
    f"{OVERRIDE}.recompute_num_layers=1",
    f"{OVERRIDE}.experimental_attention_variant=dsa",
    f"{OVERRIDE}.moe_router_enable_expert_bias=True",
    f"{OVERRIDE}.moe_router_dtype=fp32",
    f"{OVERRIDE}.moe_shared_expert_overlap=False",
    f"{OVERRIDE}.context_parallel_algo=kvallgather_cp_algo",
    f"{OVERRIDE}.reset_position_ids=False",
    f'{OVERRIDE}.pipeline_model_parallel_layout="Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L"',
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=8",
    f"{ROLLOUT}.data_parallel_size=8",
    f"{ROLLOUT}.expert_parallel_size=64",
    f"{ROLLOUT}.calculate_log_probs=True",
    f"{ROLLOUT}.enforce_eager=False",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=34816",
    f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.enable_cpu_binding=True",
    f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
    f"{ROLLOUT}.enable_rollout_routing_replay=True",
    "async_training.partial_rollout=True",
    "trainer.device=npu",
]
"""verl's own job with R3 for Megatron core_v0.18.0 on NPUs: GLM-5.2, fully async, in padded sequences.

The lines are those of its `examples/ascend_extras/grpo_trainer/run_glm5_2_megatron.sh` that say what the
engine of the actor runs and what its rollout is asked for, without data, paths, optimizer and the reference.
"""


@pytest.mark.skipif(not PADS_TO_MINI_BATCH, reason="a script for verl 0.9.1 and later")
def test_verls_own_job_in_padded_sequences_is_let_through(
    engines: list[probe.Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data-parallel engines of vllm-ascend it needs npu_replay's capture, as every job does."""
    has(engines, ASCEND)
    folder = CONFIGS.parents[1] / "experimental" / "fully_async_policy" / "config"
    lines = [f"hydra.searchpath=[file://{CONFIGS}]", *GLM_5_2]
    config = overridden("fully_async_ppo_megatron_trainer", lines, folder=folder).actor_rollout_ref
    with pytest.raises(ReplayError, match="under data parallelism"):
        verl_config.check_actor(config)
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "1")
    assert verl_config.check_actor(config) == "R3"


def test_strict_0_logs_every_problem_once_and_undoes_all_changes(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    undone: list[str] = []
    monkeypatch.setattr(verl_config, "undo_everything", lambda: undone.append("all"))
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    with caplog.at_level(logging.ERROR):
        workers.check(None, key="R3", unpadded=False)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert undone == ["all"]


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


def made(workers: Workers, **settings: Any) -> Any:
    """A worker whose constructor hasn't run."""
    worker = workers.cls.__new__(workers.cls)
    worker.config = workers.actor(**settings)
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
        assert "NPU_REPLAY_DISABLE=on" in line


@pytest.mark.megatron
def test_a_shim_that_failed_stops_the_worker_of_a_job_that_replays(
    installed: None, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(import_hook._failures, "another shim", "KeyError: 1")
    verl_config._check_worker(made(workers, key="disabled"), workers.legacy)
    with pytest.raises(ReplayError, match="another shim failed: KeyError: 1"):
        verl_config._check_worker(made(workers, key="R2"), workers.legacy)
