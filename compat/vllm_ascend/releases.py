"""Holds vllm-ascend's table of releases: the routes that each returns, and the plans that give none.

    from          up to         captured              ids      place
    0.18.0        0.23.0.post1  unquantized           logical  AscendUnquantizedFusedMoEMethod.apply
    0.24.0rc1     0.26.0rc1     nothing: all zeros             the same, behind a config that is never set
    0.27.1rc1     0.29.0rc1     all                   logical  the routers, by vLLM's own binder
    0.30.0rc1     0.30.0        all                   logical  the same, by Model Runner V2 only

A patch for tokens that data or sequence parallelism split (#9728) is in 0.21.0rc1; on vLLM's release of the
same number it is installed from 0.25.1rc1 on. All was read in the released source; 0.18.0, 0.23.0 and
0.30.0rc2 were run on a CPU with stand-ins for the NPU's operators; of 0.30.0 nothing was. Where npu_replay
captures, a worker's classes decide (`parts`), and this table only for a plan. See also
docs/dev/engine-limits.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from npu_replay.compat.probe import Capability, Product, unusable
from npu_replay.environment import VLLM_ASCEND
from npu_replay.errors import ReplayError, one_of
from npu_replay.rollout import engine_plan, model_config
from npu_replay.rollout.engine_plan import on, says, several
from npu_replay.rollout.release_rules import (
    Clash,
    EnginePlan,
    Fault,
    Releases,
    Symptom,
    older,
    release,
    tells_release,
)

CAPABILITY = "routes of vllm-ascend"
PLUGIN = "npu_replay"
"""The plug-in's name, which VLLM_PLUGINS must contain, if it is set."""
BY_ROUTER = "0.27.0"
"""The first release whose layers choose by vLLM's routers, which call vLLM's capturer."""
OLDEST = "0.18.0"
"""The oldest release that is checked."""

Soc = Literal["A2", "A3", "A5", "310P"]
"""Generations of the processor: Atlas 800T A2 (910B), Atlas 800 A3 (910C), 950, and Atlas inference cards."""


def refusal(
    version: str,
    plan: EnginePlan | None = None,
    vllm: str = "",
    *,
    capture: bool = False,
    keys: Mapping[str, str] | None = None,
) -> ReplayError | None:
    """Return why this release gives zeros, or nothing, with this plan; None if routes are right.

    The plan may hold `soc`, the processor's generation (`Soc`); a model's own folder or config may also say
    that it is quantized. With `capture` npu_replay captures (`plugin`). `keys` has a framework's names of the
    arguments, for the words.
    """
    plan = plan or {}
    if capture:
        return unknown(version, vllm or None) or not_captured(version, plan, keys)
    never = engine_plan.refusal("vllm-ascend", version, "", (OLDER, *FAULTS))
    quantization = plan.get("quantization") or model_config.quantization(plan.get("model"))
    known = {**plan, "quantization": quantization}
    return never or engine_plan.clash(
        "vllm-ascend", version, "", known, engine_plan.sure(CLASHES, version), keys
    )


def not_captured(version: str, plan: EnginePlan, keys: Mapping[str, str] | None = None) -> ReplayError | None:
    """Return why npu_replay captures nothing with this plan, or wrong rows; None if it captures."""
    return engine_plan.clash("npu_replay on vllm-ascend", version, "", plan, CAPTURE_CLASHES, keys)


def of_release(version: str, vllm: str) -> str:
    """Return the release whose rules hold; a build between releases has those of its vLLM."""
    # Images carry «0.18.1.dev45», and «0.1.dev1» from a shallow clone.
    between = "dev" in version or not tells_release(version)
    return vllm if version and between and tells_release(vllm) else version


def unpaired(version: str, vllm: str) -> ReplayError | None:
    """Return why npu_replay captures nothing on so old a release, or beside this vLLM; None if it may."""
    rules = of_release(version, vllm)
    problem = f"npu_replay captures nothing on vllm-ascend {version}"
    has_release = tells_release(rules)
    if has_release and tells_release(vllm) and release(rules)[:2] != release(vllm)[:2]:
        problem += f" beside vLLM {vllm}"
        return ReplayError(
            problem,
            where="vllm-ascend",
            expected="the vLLM that it is made for",
            got=vllm,
            cause="one of them was installed without the other",
        )
    if has_release and OLDER.holds(rules):
        return ReplayError(problem, where="vllm-ascend", expected=_PLANNED, got=version, cause=_OTHERWISE)
    return None


def unknown(version: str, vllm: str | None = None) -> ReplayError | None:
    """Return why a plan isn't captured on this release, beside this vLLM; None if it is, as far as is known.

    A worker doesn't ask this: it looks at the classes that are there (`parts.check`).
    """
    wrong_pair = None if vllm is None else unpaired(version, vllm)
    rules = version if vllm is None else of_release(version, vllm)
    if wrong_pair is not None or (release(rules) != (0, 0, 0) and any(run.holds(rules) for run in _CAPTURED)):
        return wrong_pair
    return ReplayError(
        f"npu_replay captures nothing on vllm-ascend {version}",
        where="rollout",
        expected=_PLANNED,
        got=version,
        cause=_OTHERWISE,
    )


def environment() -> dict[str, str]:
    """Return the variables that the engine's processes need for npu_replay to capture."""
    # The processes inherit a filter of this one, which must contain the plug-in.
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return {VLLM_ASCEND: "on"}
    return {VLLM_ASCEND: "on", "VLLM_PLUGINS": ",".join(filter(None, (allowed, PLUGIN)))}


def needs_v2(version: str, model: Any = None) -> bool:
    """Return whether there are routes, or right ones, with VLLM_USE_V2_MODEL_RUNNER=1 only."""
    at = release(version)
    has_groups = model_config.is_hybrid(model) or model_config.has_windows(model)
    return at >= (0, 30, 0) or (at >= (0, 28, 0) and has_groups)


def needs_sync(version: str) -> bool:
    """Return whether rows are right with async_scheduling=False only."""
    return release(version) < release(_SNAPSHOTS)


def faults(version: str) -> tuple[Fault, ...]:
    """Return the faults of that release, for whichever vLLM is beside it."""
    name = f"vllm-ascend {version}"
    of_release = (fault for fault in FAULTS if fault.holds(version))
    return tuple(replace(fault, since="", until="", cause=f"{name} {fault.cause}") for fault in of_release)


def guesses() -> Iterator[Fault]:
    """Yield the faults for an unknown release; vLLM's number stands for it."""
    for fault in FAULTS:
        yield replace(fault, device="npu", always="", cause=f"on Ascend, vllm-ascend {fault.cause}")


def capability(product: Product, vllm: str = "") -> Capability:
    """Return whether vllm-ascend's rollouts have routes, as far as the release tells."""
    if not product.usable:
        return unusable(CAPABILITY, product)
    version = of_release(product.version, vllm)
    if not version:
        return Capability(CAPABILITY, "works", "but its release isn't known, and some give zeros")
    problem = refusal(version)
    if problem is not None:
        return Capability(CAPABILITY, "broken", problem.problem, f"take {problem.expected}")
    some = refusal(version, {"quantization": "any"})
    captured = "unquantized experts alone are captured" if some else "the experts of every layer are captured"
    runner = ", with VLLM_USE_V2_MODEL_RUNNER=1 alone" if needs_v2(version) else ""
    return Capability(CAPABILITY, "works", captured + runner)


# ---- rules of the rows below

_SPLIT_FROM_EP: dict[Soc | None, int] = {"A2": 16, "A3": 2, "A5": 2}
"""The least number of expert-parallel ranks from which on tokens are split over tensor-parallel ranks before
routing. For an unknown processor nothing is refused."""


_CHIPS = {"910B": "A2", "910C": "A3", "950": "A5"}
"""Generations by the names of their chips, which images and boxes have."""


def soc_of(name: str) -> Soc:
    """Return the processor's generation by its name or its chip's; refuse any other name."""
    soc = _CHIPS.get(str(name).upper(), str(name).upper())
    one_of(soc, get_args(Soc), "processor", "soc")
    return soc  # type: ignore[return-value]


def _ranks(plan: EnginePlan) -> tuple[int, int]:
    """Return the tensor-parallel and data-parallel sizes, which may be text or None in a config."""
    tp, dp = (engine_plan.number(plan.get(f"{kind}_parallel_size")) or 1 for kind in ("tensor", "data"))
    return tp, dp


def _of_a_hybrid(plan: EnginePlan, _: Any) -> bool:
    return model_config.is_hybrid(plan.get("model"))


def reads_two_groups(plan: EnginePlan, _: Any) -> bool:
    """Return whether layers of a window have KV cache blocks of their own."""
    return model_config.has_windows(plan.get("model")) and not plan.get("disable_hybrid_kv_cache_manager")


def _splits_tokens(plan: EnginePlan, _: Any) -> bool:
    """Return whether tokens are split over tensor-parallel ranks before routing, and not gathered again."""
    tp, dp = _ranks(plan)
    least = _SPLIT_FROM_EP.get(plan.get("soc"))
    return bool(plan.get("enable_expert_parallel") and dp == 1 and least is not None and tp >= least)


def _fills_up(plan: EnginePlan, _: Any) -> bool:
    """Return whether tokens are padded to the longest data-parallel rank's, and not split over TP ranks."""
    tp, dp = _ranks(plan)
    least = _SPLIT_FROM_EP.get(plan.get("soc"))
    return bool(plan.get("enable_expert_parallel") and tp == 1 < dp and least is not None and dp >= least)


def _shares_parts(plan: EnginePlan, _: Any) -> bool:
    """Return whether MoE layers share tokens out in parts; from 0.27 on only with flash comm."""
    config = engine_plan.as_mapping(plan.get("additional_config"))
    flash = any(config.get(name) for name in ("enable_flashcomm1", "enable_dsa_cp"))
    return bool(flash and min(_ranks(plan)) > 1 and plan.get("enable_expert_parallel"))


def _asks(*keys: str) -> Callable[[EnginePlan, tuple[str, ...]], bool]:
    """Make a rule that holds if a key is on in vllm-ascend's own config."""

    def asks(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
        value = plan.get(arguments[0])
        for key in keys:
            value = engine_plan.as_mapping(value).get(key)
        return bool(value)

    return asks


def _splits_by_pass(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
    by_pass = _asks("pass_config", "enable_sp")(plan, arguments)
    return (
        by_pass and engine_plan.number(plan.get("tensor_parallel_size")) > 1 and not plan.get("enforce_eager")
    )


# fmt: off
# ---- the rows

_SNAPSHOTS = "0.23.0"
"""The first release that copies the rows before the next step overwrites their buffer."""
_WORKING = "vllm-ascend 0.23.0 captures unquantized models, 0.27.1rc1 and later all"
_OR_OURS = "; or npu_replay's own capture (NPU_REPLAY_VLLM_ASCEND=on; in engine_arguments, capture=True)"
_ONE_RANK = "captures one tensor-parallel rank's tokens with expert parallelism and no data parallelism"

OLDER = older(OLDEST, "0.18.0 and later: " + _WORKING)
FAULTS = (
    Fault(Symptom.ZEROS, since="0.24.0", until="0.27.1", always="gives zeros for every id",
          instead="0.23.0.post1 and earlier, or 0.27.1rc1 and later",
          cause="skips the capture, as 0.24.0rc1 to 0.26.0rc1 all do: it asks for vLLM's config while the "
          f"model runs, when none is set (vllm-ascend#16314). {_WORKING}"),
    Fault(Symptom.ZEROS, since=OLDEST, until="0.24.0",
          cause="captures no quantized experts. Take an unquantized model, or 0.27.1rc1 and later"),
    Fault(Symptom.ZERO_ROWS, since=OLDEST, until="0.28.0",
          cause=f"{_ONE_RANK}, and the other rows are zeros"),
    Fault(Symptom.ZERO_ROWS, since="0.28.0", until="0.30.0",
          cause="reads a hybrid model's rows from KV cache group 0, which may be another than attention's"),
    Fault(Symptom.STALE_ROWS, since="0.28.0",
          cause=f"{_ONE_RANK}, and the other rows are an earlier step's"),
)
"""The faults of its routes; an error puts its name and release in front."""

_SYNCHRONOUS = Clash(
    ("async_scheduling",), on, until=_SNAPSHOTS,
    problem="hands out rows of the next step under asynchronous scheduling",
    instead="async_scheduling=False, or vllm-ascend 0.23.0 and later",
    why="rows are read from a buffer that the next step fills again (vllm-ascend#10727)")
_SPLIT = ("tensor_parallel_size", "enable_expert_parallel", "data_parallel_size")
_WINDOWS = ("model", "disable_hybrid_kv_cache_manager")

_TWO_HALVES = tuple(
    Clash((name,), when, instead=f"{name}={value}",
          problem="captures wrong rows with two half batches at once",
          why="both write the same rows: the first half's are lost, and behind them are an earlier step's")
    for name, when, value in (("enable_dbo", on, False), ("ubatch_size", several, 0)))

CLASHES = (
    *_TWO_HALVES,
    Clash(("quantization",), on, until="0.24.0",
          problem="captures no quantized experts: every id would be 0",
          instead="an unquantized model, or vllm-ascend 0.27.1rc1 and later" + _OR_OURS,
          why="each way of quantizing chooses experts by itself there, past the capture"),
    Clash(("soc",), says("310p"), until="0.24.0",
          problem="captures nothing on 310P: every id would be 0",
          instead="vllm-ascend 0.27.1rc1 and later" + _OR_OURS,
          why="its MoE layers are others there, which choose experts past the capture"),
    _SYNCHRONOUS,
    Clash(("model",), _of_a_hybrid, until="0.28.0", got="a hybrid model",
          problem="reads the rows of a model with linear attention from the wrong KV cache group",
          instead="vllm-ascend 0.28.0rc1 and later, with VLLM_USE_V2_MODEL_RUNNER=1" + _OR_OURS,
          why="its model runner keeps the slots of group 0 alone (vllm-ascend#8651, #9016)"),
    Clash(_WINDOWS, reads_two_groups, until="0.28.0", got="a model with layers of a window beside others",
          problem="reads the rows of a model with two kinds of attention from the wrong KV cache group",
          instead="disable_hybrid_kv_cache_manager=True, or vllm-ascend 0.28.0rc1 and later, with "
          "VLLM_USE_V2_MODEL_RUNNER=1" + _OR_OURS,
          why="its model runner keeps the slots of group 0 alone (vllm-ascend#8651, #9016)"),
    Clash(("data_parallel_size",), several, until="0.25.1",
          problem="ends in an AssertionError under data parallelism, once ranks have different numbers of "
          "tokens",
          instead="data_parallel_size=1, or vllm-ascend 0.27.1rc1 and later" + _OR_OURS,
          why="vLLM's own capture runs there, which knows no tokens that are padded or put together before "
          "they are routed; what mends it (vllm-ascend#9728) is installed from 0.25.1rc1 on"),
    Clash(_SPLIT, _splits_tokens,
          problem="captures one token in {tensor_parallel_size} on {soc}: the other rows would be zeros or, "
          "from 0.28.0rc1 on, an earlier step's",
          instead="expert parallelism off, data_parallel_size above 1 from 0.27.1rc1 on" + _OR_OURS,
          why="tokens are split over the tensor-parallel ranks before they are routed, and without data "
          "parallelism the capture takes each rank's part for the whole"),
    Clash(_SPLIT, _fills_up, since="0.27.0",
          problem="ends in an AssertionError on {soc}, once ranks have different numbers of tokens",
          instead="tensor_parallel_size above 1, or expert parallelism off" + _OR_OURS,
          why="tokens are filled up to the longest rank's before they are routed, which the capture knows "
          "with tensor parallelism alone"),
    Clash(("additional_config", *_SPLIT), _shares_parts, since=BY_ROUTER,
          problem="hands out wrong rows with flash comm, or ends in an AssertionError",
          instead="enable_flashcomm1 and enable_dsa_cp off" + _OR_OURS,
          why="its layout patch takes a rank's part of the tokens for others (vllm-ascend#9728)"),
)

_TRIMMED = (
    "vLLM's scheduler cuts a step's rows by the numbers from before drafts were left out, so requests behind "
    "one get another's"
)
TRIMS_DRAFTS = (
    Clash(("speculative_config",), since="0.22.0", until="0.31.0",
          when=lambda plan, names: engine_plan.as_mapping(plan.get(names[0])).get("method") == "ngram_gpu",
          instead='another method, such as "ngram"', why=_TRIMMED),
    Clash(("speculative_config",), _asks("enable_adaptive_verification"), since="0.28.0",
          instead="enable_adaptive_verification=False",
          why=f"{_TRIMMED}; vLLM itself refuses it in later releases"),
)
"""Plans in which fewer tokens run than vLLM's scheduler counts; they are rows of vLLM's own table, too."""

_ONE_WORKER = "a sample's rows come from one worker, which runs all layers and all its tokens"
CAPTURE_CLASHES = (
    _SYNCHRONOUS,
    Clash(("additional_config",), _asks("xlite_graph_config", "enabled"),
          problem="captures nothing under xlite", instead="xlite_graph_config off",
          why="its graph chooses experts by itself, past everything that could be heard"),
    Clash(("additional_config",), _asks("enable_force_eplb"),
          problem="captures other experts than those that run", instead="enable_force_eplb off",
          why="it is for benchmarks, and replaces the chosen experts after the choice"),
    Clash(("compilation_config", "tensor_parallel_size", "enforce_eager"), _splits_by_pass, until="0.27.0",
          problem="doesn't know where rows belong when a compiler's pass splits them",
          instead="sequence parallelism by VLLM_ASCEND_ENABLE_FLASHCOMM1=1",
          why="that pass leaves rows in that fill up, in places that nothing tells"),
    *_TWO_HALVES,
    *TRIMS_DRAFTS,
    Clash(("pipeline_parallel_size",), several, instead="1", why=_ONE_WORKER),
    Clash(("prefill_context_parallel_size", "decode_context_parallel_size"), several, instead="1",
          why=_ONE_WORKER),
    Clash(("kv_transfer_config",), on, instead="none",
          why="the rows of tokens whose KV cache comes from elsewhere don't come with it"),
    Clash(("model",), _of_a_hybrid, until="0.22.0", got="a hybrid model",
          problem="captures no model with linear attention", instead="vllm-ascend 0.22.1rc1 and later",
          why="vLLM keeps too few slots for one there (vllm-ascend#8216)"),
    Clash(_WINDOWS, reads_two_groups, until="0.22.0", got="a model with layers of a window beside others",
          problem="captures no model with two kinds of attention",
          instead="disable_hybrid_kv_cache_manager=True, or vllm-ascend 0.22.1rc1 and later",
          why="vLLM keeps too few slots for one there (vllm-ascend#8216)"),
)
"""Plans with which npu_replay captures nothing either."""

_CAPTURED = (Releases(since="0.18.0", until="0.21.0"), Releases(since="0.22.0", until="0.31.0"))
_PLANNED = "0.18.0 to 0.20.2rc1, or 0.22.1rc1 to 0.30"
_OTHERWISE = (
    "0.21.0rc1 and releases from 0.31 on return no rows by vLLM's capturer, which npu_replay uses (from vLLM "
    "0.31.0 on the AuxOutput connector does), and nobody checks those before 0.18.0. Or unset "
    f"{VLLM_ASCEND}"
)
# fmt: on
