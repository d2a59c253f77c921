"""Which cases run, and what each release hands out of them by itself: right rows, or its error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest

from on_vllm_ascend.cases import Case

RELEASES = {"0.18.0": "0.18.0", "0.23.0": "0.23.0", "0.30.0rc2": "0.30.0"}
"""Of vllm-ascend, each with its vLLM."""
OLD, MID, NEW = RELEASES
SPLITTING = ("MC2", "FUSED_MC2", "ALLTOALL")
ASSERTS = "AssertionError"
UNEVEN = "invalid tensor size"
"""gloo gathers no parts of different sizes; HCCL's answer isn't known."""

SCHEMES = {
    OLD: ("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8_MIX"),
    MID: (
        *("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8_MIX", "W8A8FP8_DYNAMIC"),
        *("W4A16_MXFP4", "W4A8_MXFP", "W4A4_MXFP4", "FP8/w4a8_moe"),
    ),
    NEW: (
        *("W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16", "W8A8_MXFP8", "W8A8FP8_DYNAMIC"),
        *("W4A16_MXFP4", "W4A8_MXFP", "W4A4_MXFP4", "fp8", "fp8/ds_w4a8_moe"),
    ),
}
"""Every way to quantize experts that a release registers; a test holds it against the registry."""


@dataclass(frozen=True)
class Path:
    """A case and what comes of it, release by release; a release that isn't named hasn't got it."""

    case: Case
    as_released: dict[str, int | str]
    quick: bool = True


def marked(found: list[Path], release: str, quick: Collection[str] | None = None) -> list[Any]:
    """Those that a release has, for pytest; what --quick leaves out is slow. `quick` names the others."""
    kept = {path.case.name for path in found if path.quick} if quick is None else quick
    return [
        pytest.param(path, id=path.case.name, marks=() if path.case.name in kept else pytest.mark.slow)
        for path in found
        if release in path.as_released
    ]


def every(value: int | str) -> dict[str, int | str]:
    return dict.fromkeys(RELEASES, value)


def paths() -> list[Path]:
    quantized = Case(scheme="W8A8_DYNAMIC")
    shrinking = ((13,), (5,), (1,))
    unequal = Case(dp=2, steps=((13, 9),))
    return [
        Path(Case(), every(39)),
        Path(Case(routing="grouped_sigmoid"), every(39)),
        Path(replace(quantized, routing="grouped_sigmoid"), {OLD: 0, MID: 0, NEW: 39}, quick=False),
        Path(Case(draft=True), {OLD: 39, MID: 39, NEW: 52}),  # of 52
        Path(Case(padding=3), every(39)),
        Path(Case(steps=shrinking), every(57)),
        Path(Case(overlap_gate=True), {OLD: 39, MID: 39}),
        Path(replace(quantized, overlap_gate=True), {OLD: 0, MID: 0}),
        Path(Case(overlap_gate=True, tp=2), {OLD: 39, MID: 39}, quick=False),
        Path(replace(quantized, overlap_gate=True, tp=2), {OLD: 0, MID: 0}, quick=False),
        Path(Case(comm="MC2", tp=2, kv_cache_twice=True), {MID: 21, NEW: 21}),
        Path(Case(device="_310P"), {OLD: 0, MID: 0, NEW: 39}, quick=False),
        Path(replace(quantized, device="_310P"), {OLD: 0, MID: 0, NEW: 39}, quick=False),
        # Each rank has a part of the tokens, and the others' are lost.
        Path(Case(tp=2), every(39)),
        *(Path(Case(comm=comm, tp=2), every(21)) for comm in SPLITTING),
        *(Path(replace(quantized, comm=comm, tp=2), {OLD: 0, MID: 0, NEW: 21}) for comm in SPLITTING),
        Path(replace(quantized, tp=2), {OLD: 0, MID: 0, NEW: 39}),
        *(Path(Case(comm=comm, tp=2, steps=shrinking), every(33)) for comm in ("MC2", "FUSED_MC2")),
        Path(Case(comm="MC2", tp=2, padding=3), every(24), quick=False),
        Path(Case(comm="MC2", tp=2, draft=True), {OLD: 21, MID: 21, NEW: 28}, quick=False),
        # More ranks than some have tokens: parts of unequal size, and ranks without one.
        *(Path(Case(comm=comm, tp=4, steps=((13,), (2,), (1,))), every(18)) for comm in ("MC2", "ALLTOALL")),
        Path(Case(tp=2, eplb=True), every(39)),
        Path(Case(comm="MC2", tp=2, eplb=True), every(21)),
        Path(replace(quantized, comm="MC2", tp=2, eplb=True), {OLD: 0, MID: 0, NEW: 21}),
        Path(replace(quantized, tp=2, mix_placement=True), {MID: 0, NEW: 39}),
        Path(Case(tp=2, sequence_parallel=True), {OLD: 39, MID: 39}),
        *(Path(Case(comm=comm, tp=2, sequence_parallel=True), {OLD: 21, MID: 21}) for comm in SPLITTING),
        # Enough tokens for a rank's part to be held against logits.
        Path(Case(tp=2, sequence_parallel=True, steps=((17,),)), {OLD: 51, MID: 51}),
        Path(Case(comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)), {OLD: 27, MID: 27}),
        Path(
            replace(quantized, comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)),
            {OLD: 0, MID: 0},
            quick=False,
        ),
        Path(
            Case(comm="MC2", tp=2, dp=2, sequence_parallel=True, steps=((19, 17),)),
            {OLD: ASSERTS, MID: ASSERTS, NEW: 84},
            quick=False,
        ),
        # Data parallel ranks with 13 and 9 tokens.
        Path(unequal, {OLD: ASSERTS, MID: ASSERTS, NEW: 66}),
        *(Path(replace(unequal, comm=comm), every(ASSERTS)) for comm in ("MC2", "FUSED_MC2")),
        Path(replace(unequal, comm="ALLTOALL"), {OLD: ASSERTS, MID: 66, NEW: 66}),
        Path(replace(unequal, scheme="W8A8_DYNAMIC"), {OLD: 0, MID: 0, NEW: 66}, quick=False),
        Path(replace(unequal, tp=2), {OLD: ASSERTS, MID: ASSERTS, NEW: 66}),
        *(
            Path(replace(unequal, tp=2, comm=comm), {OLD: ASSERTS, MID: ASSERTS, NEW: 66})
            for comm in ("MC2", "FUSED_MC2")
        ),
        Path(replace(unequal, tp=2, comm="ALLTOALL"), {OLD: ASSERTS, MID: ASSERTS, NEW: UNEVEN}),
        Path(
            replace(unequal, tp=2, comm="MC2", steps=((13, 9), (1, 1), (2, 7))),
            {OLD: ASSERTS, MID: ASSERTS, NEW: 99},
        ),
        Path(replace(unequal, tp=2, sequence_parallel=True), {OLD: 66, MID: 66, NEW: ASSERTS}),
        *(
            Path(
                replace(unequal, tp=2, comm=comm, sequence_parallel=True),
                {OLD: ASSERTS, MID: ASSERTS, NEW: 54},
            )
            for comm in ("MC2", "FUSED_MC2")
        ),
        Path(
            replace(unequal, tp=2, comm="ALLTOALL", sequence_parallel=True),
            {OLD: ASSERTS, MID: ASSERTS, NEW: UNEVEN},
        ),
        *schemes(),
    ]


def schemes() -> list[Path]:
    """Each of each release. To 0.26 none of them is captured."""
    names = sorted({name for of_release in SCHEMES.values() for name in of_release})
    return [
        Path(
            Case(scheme=name),
            {release: 39 if release == NEW else 0 for release in RELEASES if name in SCHEMES[release]},
        )
        for name in names
    ]
