"""vllm-ascend: which release hands out which routes, release by release, as its source has it.

    from          up to         captured              ids      place
                  0.14.0rc1     nothing
    0.15.0rc1     0.19.1rc1     unquantized           logical  AscendUnquantizedFusedMoEMethod.apply
    0.20.2rc1     0.20.2rc1     unquantized           logical  the same, without the capturer's singleton
    0.21.0rc1     0.23.0.post1  unquantized           logical  the same
    0.24.0rc1     0.26.0rc1     nothing: all zeros             the same, behind a config that is never set
    0.27.1rc1     0.29.0rc1     all                   logical  the routers, by vLLM's own binder
    0.30.0rc1     0.30.0rc2     all                   logical  the same, by Model Runner V2 alone

0.21.0rc1 has a patch that puts together the tokens that data or sequence parallelism split (#9728); on vLLM's
release of the same number it is installed from 0.25.1rc1 on.

All of it was read in the released source; 0.18.0, 0.23.0 and 0.30.0rc2 were run on a CPU with stand-ins for
the NPU's operators. Nothing of it is imported or changed. Where
`npu_replay` makes a release capture that doesn't by itself, it will be done here: `refusal` then says so.

Probes: `capability`. Offers: `Setting`, `check`, `refusal`, `limits`, `needs_v2`, `needs_sync`,
`faults`, `guesses`. Nothing to undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from npu_replay.compat.probe import Capability, Product
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_config
from npu_replay.rollout.admit import Fault, Symptom
from npu_replay.rollout.releases import release

CAPABILITY = "routes of vllm-ascend"
NEWEST = "0.30.0rc2"
"""The newest release whose source was read; what comes later is taken for its like."""

Soc = Literal["A2", "A3", "A5", "310P"]
"""Generations of the processor: Atlas 800T A2 (910B), Atlas 800 A3 (910C), 950, and Atlas inference cards."""

Captures = Literal["nothing", "zeros", "unquantized", "all"]
"""zeros: the switch is taken, and every id is 0."""

_WORKING = "vllm-ascend 0.23.0 captures unquantized models, 0.27.1rc1 and later all"
_SPLIT_FROM_EP = {"A2": 16, "A3": 2, "A5": 2}
"""From how many expert-parallel ranks on tokens may be split over tensor-parallel ranks before routing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the releases from one on capture, up to the next row of the table.

    Attributes:
        since: the first of them.
        captures: what of a model's layers is captured.
        splits: are tokens that data or sequence parallelism split put together right, on vLLM's release of
            the same number? Else an assertion ends the engine as soon as ranks have different numbers.
        lost: what stands in rows that were never written.
        hybrids: are models with linear attention read by the right KV cache group: by no model runner, by the
            second alone, or by all?
        runner: the model runner without which there are none; empty if any will do.
    """

    since: str
    captures: Captures
    splits: bool = False
    lost: Literal["zeros", "an earlier step's"] = "zeros"
    hybrids: Literal["never", "V2", "always"] = "never"
    runner: str = ""


_UNCLEARED: Final = "an earlier step's"  # vLLM's buffer is never cleared from 0.28 on
TABLE = (
    Row(since="0.0.0", captures="nothing"),
    Row(since="0.15.0", captures="unquantized"),
    Row(since="0.24.0", captures="zeros"),
    Row(since="0.25.1", captures="zeros", splits=True),
    Row(since="0.27.1", captures="all", splits=True),
    Row(since="0.28.0", captures="all", splits=True, lost=_UNCLEARED, hybrids="V2"),
    Row(since="0.30.0", captures="all", splits=True, lost=_UNCLEARED, hybrids="always", runner="V2"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a rollout is planned with, as far as it is known.

    Attributes:
        model: a RoutedModel, or a Hugging Face config: its path or its folder's, its contents, an object.
        quantization: vLLM's argument of that name. A model's own folder or config may say so too.
        data_parallel, tensor_parallel: ranks.
        expert_parallel: is it on?
        soc: the processor's generation.
        async_scheduling: is it on? None: as vLLM likes.
    """

    model: Any = None
    quantization: str | None = None
    data_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: bool = False
    soc: Soc | None = None
    async_scheduling: bool | None = None

    @property
    def quantized(self) -> str:
        """How the experts are quantized, in words; empty if they aren't, as far as is known."""
        if self.quantization:
            return f"quantization={self.quantization!r}"
        said = engine_config.quantization(self.model)
        return f"a model with {said}" if said else ""

    @property
    def hybrid(self) -> bool:
        """Has the model linear attention in some layers, as far as is known?"""
        return engine_config.is_hybrid(self.model)

    @property
    def ranks_of_experts(self) -> int:
        """Over how many ranks experts are spread."""
        return self.data_parallel * self.tensor_parallel if self.expert_parallel else 1


def row_of(version: str) -> Row:
    """The row of the table that a release is in."""
    return [known for known in TABLE if release(version) >= release(known.since)][-1]


def check(version: str, setting: Setting = Setting()) -> None:
    """Refuse a release that will give zeros, or nothing, with this model and these settings.

    Raises:
        ReplayError: what is missing, and what to do instead.
    """
    problem = refusal(version, setting)
    if problem is not None:
        raise problem


def refusal(version: str, setting: Setting) -> ReplayError | None:
    """What `check` raises; None where routes are right, as far as the source tells."""
    known = row_of(version)
    if known.captures == "nothing":
        return _refused(
            version, "knows no routes", "0.15.0rc1 or later", version, f"an old release: {_WORKING}"
        )
    if known.captures == "zeros":
        return _refused(
            version,
            "gives zeros for every id",
            "0.23.0.post1 and earlier, or 0.27.1rc1 and later",
            version,
            "it asks for vLLM's config while the model runs, when none is set, and skips the capture "
            f"(vllm-ascend#16314). {_WORKING}",
        )
    if known.captures == "unquantized" and setting.quantized:
        return _refused(
            version,
            "captures no quantized experts: every id would be 0",
            "an unquantized model, or vllm-ascend 0.27.1rc1 and later",
            setting.quantized,
            "each way of quantizing chooses experts by itself there, past the capture",
        )
    if known.captures == "unquantized" and setting.soc == "310P":
        return _refused(
            version,
            "captures nothing on 310P: every id would be 0",
            "vllm-ascend 0.27.1rc1 and later",
            "soc='310P'",
            "its MoE layers are others there, which choose experts past the capture",
        )
    if setting.async_scheduling and needs_sync(version):
        return _refused(
            version,
            "hands out rows of the next step under asynchronous scheduling",
            "async_scheduling=False, or vllm-ascend 0.23.0 and later",
            "async_scheduling=True",
            "rows are read from a buffer that the next step fills again (vllm-ascend#10727)",
        )
    if known.hybrids == "never" and setting.hybrid:
        return _refused(
            version,
            "reads the rows of a model with linear attention from the wrong KV cache group",
            "vllm-ascend 0.28.0rc1 and later, with VLLM_USE_V2_MODEL_RUNNER=1",
            "a hybrid model",
            "its model runner keeps the slots of group 0 alone (vllm-ascend#8651, #9016)",
        )
    if not known.splits and setting.data_parallel > 1:
        return _refused(
            version,
            "ends in an AssertionError under data parallelism, once ranks have different numbers of tokens",
            "data_parallel_size=1, or vllm-ascend 0.27.1rc1 and later",
            f"data_parallel_size={setting.data_parallel}",
            "vLLM's own capture runs there, which knows no tokens that are padded or put together before "
            "they are routed; what mends it (vllm-ascend#9728) is installed from 0.25.1rc1 on",
        )
    if setting.soc is not None and _splits_tokens(setting):
        remedy = "data_parallel_size above 1, or " if known.splits else ""
        return _refused(
            version,
            f"captures one token in {setting.tensor_parallel} on {setting.soc}: the other rows would be "
            f"{known.lost}",
            f"{remedy}expert parallelism off",
            f"tensor_parallel_size={setting.tensor_parallel} with expert parallelism and no data parallelism",
            "tokens are split over the tensor-parallel ranks before they are routed, and without data "
            "parallelism the capture takes each rank's part for the whole"
            + (", in a buffer that is never cleared" if known.lost == _UNCLEARED else ""),
        )
    return None


def limits(version: str, setting: Setting = Setting()) -> tuple[str, ...]:
    """What holds of that release, one sentence each, where `check` can't know whether it matters."""
    known, found = row_of(version), []
    if release(version) > release(NEWEST):
        found.append(
            f"vllm-ascend {version} is newer than {NEWEST}, the newest that was looked at: taken for its like"
        )
    if _is_of_main(version):
        found.append(
            f"vllm-ascend {version} is no release: builds of its main branch between 1 and 12 August 2026 "
            "give physical ids"
        )
    if known.captures == "unquantized":
        found.append(f"vllm-ascend {version} captures unquantized experts alone")
    if needs_v2(version, setting):
        found.append(
            f"vllm-ascend {version} gives these routes with Model Runner V2 alone: "
            "VLLM_USE_V2_MODEL_RUNNER=1 has to be in the engine's environment"
        )
    if setting.soc is None and _splits_tokens(setting):
        found.append(
            f"vllm-ascend {version} loses rows, which are {known.lost} then, with expert parallelism over "
            f"tensor_parallel_size={setting.tensor_parallel} and no data parallelism, on A3, A5, and A2 from "
            "16 ranks on (say soc= to have it checked)"
        )
    return tuple(found)


def needs_v2(version: str, setting: Setting = Setting()) -> bool:
    """Are there routes, or right ones, with VLLM_USE_V2_MODEL_RUNNER=1 alone?"""
    known = row_of(version)
    return known.runner == "V2" or (known.hybrids == "V2" and setting.hybrid)


def needs_sync(version: str) -> bool:
    """Are rows right with async_scheduling=False alone?"""
    return release(version) < release("0.23.0")


_NEVER = {
    "zeros": f"skips the capture, as 0.24.0rc1 to 0.26.0rc1 all do (vllm-ascend#16314). {_WORKING}",
    "unquantized": "captures no quantized experts. Take an unquantized model, or 0.27.1rc1 and later",
}
"""Why all ids are 0, by what is captured."""


def faults(version: str) -> tuple[Fault, ...]:
    """What can be wrong with routes of that release, for the door's messages. They hold of any vLLM's."""
    name = f"vllm-ascend {version}"
    of_main = Fault(
        symptom=Symptom.RANGE,
        cause=f"{name} gives physical ids, if it was built of the main branch between 1 and 12 August 2026 "
        "(vllm-ascend#13268; mended by #13882)",
    )
    return (*((of_main,) if _is_of_main(version) else ()), *_faults_of(row_of(version), name))


def guesses() -> Iterator[Fault]:
    """The same where nobody says which release it is, or whether there is one: by vLLM's, which has its
    number."""
    for known, until in zip(TABLE[1:], (*(row.since for row in TABLE[2:]), ""), strict=True):
        for fault in _faults_of(known, "on Ascend, vllm-ascend"):
            yield replace(fault, since=known.since, until=until, device="npu")


def _faults_of(known: Row, name: str) -> Iterator[Fault]:
    if known.captures in _NEVER:
        yield Fault(symptom=Symptom.ZEROS, cause=f"{name} {_NEVER[known.captures]}")
    if known.hybrids != "always":
        yield Fault(
            symptom=Symptom.ZERO_ROWS,
            cause=f"{name} reads a hybrid model's rows from KV cache group 0, which may be another than "
            "attention's",
        )
    yield Fault(
        symptom=Symptom.ZERO_ROWS if known.lost == "zeros" else Symptom.STALE_ROWS,
        cause=f"{name} captures one tensor-parallel rank's tokens with expert parallelism and no data "
        f"parallelism, and the other rows are {known.lost}",
    )


def capability(product: Product) -> Capability:
    """Routes of vllm-ascend's rollouts, as far as its release tells.

    Args:
        product: what is found of vllm-ascend.
    """
    if not product.usable:
        state: Literal["broken", "missing"] = "broken" if product.problem else "missing"
        return Capability(CAPABILITY, state, product.problem or "vllm-ascend is not installed")
    if not product.version:
        return Capability(CAPABILITY, "works", "but its release isn't known, and some give zeros")
    problem = refusal(product.version, Setting())
    if problem is not None:
        return Capability(CAPABILITY, "broken", f"{problem.problem}", f"{problem.cause}")
    notes = limits(product.version) or ("the experts of every layer are captured",)
    return Capability(CAPABILITY, "works", "; ".join(notes))


def _is_of_main(version: str) -> bool:
    return "dev" in version


def _splits_tokens(setting: Setting) -> bool:
    """Are tokens split over tensor-parallel ranks before they are routed, and not put together again?"""
    least = _SPLIT_FROM_EP.get(setting.soc, 2) if setting.soc is not None else 2
    return (
        setting.expert_parallel
        and setting.data_parallel == 1
        and setting.tensor_parallel > 1
        and setting.soc != "310P"
        and setting.ranks_of_experts >= least
    )


def _refused(version: str, problem: str, expected: str, got: str, cause: str) -> ReplayError:
    return ReplayError(
        f"vllm-ascend {version} {problem}", where="rollout", expected=expected, got=got, cause=cause
    )
