"""Which cases run. Of many of them each of these releases by itself loses rows, or ends in an error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest

from on_vllm_ascend.cases import Case

OLD = "0.18.0"
MID = "0.23.0"
NEW = "0.30.0rc2"
ALL = (OLD, MID, NEW)
OLDER = (OLD, MID)
SPLITTING = ("MC2", "FUSED_MC2", "ALLTOALL")

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
    """A case, the releases that have it, and those of them on which --quick runs it.

    In --quick each part of a case is on each way of npu_replay's through a release: OLD hands rows out in its
    own way and chooses as MID does; what communicates by MC2 or by the fused MC2 is placed alike.
    """

    case: Case
    releases: Collection[str] = ALL
    quick: Collection[str] = (MID, NEW)


def of_release(release: str) -> list[Any]:
    """The cases that a release has, for pytest; what --quick leaves out is slow."""
    return [
        pytest.param(path.case, id=path.case.name, marks=() if release in path.quick else pytest.mark.slow)
        for path in paths()
        if release in path.releases
    ]


def paths() -> list[Path]:
    quantized = Case(scheme="W8A8_DYNAMIC")
    shrinking = ((13,), (5,), (1,))
    unequal = Case(dp=2, steps=((13, 9),))
    return [
        Path(Case(), quick=ALL),
        Path(Case(routing="grouped_sigmoid")),
        Path(replace(quantized, routing="grouped_sigmoid"), quick=()),
        Path(Case(draft=True), quick=ALL),
        Path(Case(padding=3), quick=ALL),
        Path(Case(steps=shrinking), quick=ALL),
        Path(Case(overlap_gate=True), OLDER),
        Path(replace(quantized, overlap_gate=True), OLDER, quick=()),
        Path(Case(overlap_gate=True, tp=2), OLDER, quick=()),
        Path(replace(quantized, overlap_gate=True, tp=2), OLDER, quick=()),
        Path(Case(comm="MC2", tp=2, kv_cache_twice=True), (MID, NEW)),
        Path(Case(device="_310P"), quick=()),
        Path(replace(quantized, device="_310P"), quick=()),
        # Each rank has a part of the tokens, and the others' are lost.
        Path(Case(tp=2), quick=ALL),
        *(Path(Case(comm=comm, tp=2)) for comm in SPLITTING),
        Path(replace(quantized, comm="MC2", tp=2)),
        *(Path(replace(quantized, comm=comm, tp=2), quick=()) for comm in ("FUSED_MC2", "ALLTOALL")),
        Path(replace(quantized, tp=2), quick=()),
        Path(Case(comm="MC2", tp=2, steps=shrinking), quick=ALL),
        Path(Case(comm="FUSED_MC2", tp=2, steps=shrinking), quick=()),
        Path(Case(comm="MC2", tp=2, padding=3), quick=()),
        Path(Case(comm="MC2", tp=2, draft=True), quick=()),
        # More ranks than some have tokens: parts of unequal size, and ranks without one.
        *(Path(Case(comm=comm, tp=4, steps=((13,), (2,), (1,)))) for comm in ("MC2", "ALLTOALL")),
        Path(Case(tp=2, eplb=True), quick=()),
        Path(Case(comm="MC2", tp=2, eplb=True)),
        Path(replace(quantized, comm="MC2", tp=2, eplb=True), quick=()),
        Path(replace(quantized, tp=2, mix_placement=True), (MID, NEW)),
        Path(Case(tp=2, sequence_parallel=True), OLDER),
        *(Path(Case(comm=comm, tp=2, sequence_parallel=True), OLDER) for comm in ("MC2", "ALLTOALL")),
        Path(Case(comm="FUSED_MC2", tp=2, sequence_parallel=True), OLDER, quick=()),
        # Enough tokens for a rank's part to be held against logits.
        Path(Case(tp=2, sequence_parallel=True, steps=((17,),)), OLDER, quick=()),
        Path(Case(comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)), OLDER),
        Path(replace(quantized, comm="MC2", tp=2, sequence_parallel=True, steps=((17,),)), OLDER, quick=()),
        Path(Case(comm="MC2", tp=2, dp=2, sequence_parallel=True, steps=((19, 17),)), quick=()),
        # Data parallel ranks with 13 and 9 tokens.
        Path(unequal),
        Path(replace(unequal, comm="MC2")),
        *(Path(replace(unequal, comm=comm), quick=()) for comm in ("FUSED_MC2", "ALLTOALL")),
        Path(replace(unequal, scheme="W8A8_DYNAMIC"), quick=()),
        Path(replace(unequal, tp=2)),
        *(Path(replace(unequal, tp=2, comm=comm)) for comm in ("MC2", "ALLTOALL")),
        Path(replace(unequal, tp=2, comm="FUSED_MC2"), quick=()),
        Path(replace(unequal, tp=2, comm="MC2", steps=((13, 9), (1, 1), (2, 7))), quick=ALL),
        Path(replace(unequal, tp=2, sequence_parallel=True)),
        Path(replace(unequal, tp=2, comm="MC2", sequence_parallel=True), quick=ALL),
        *(
            Path(replace(unequal, tp=2, comm=comm, sequence_parallel=True), quick=())
            for comm in ("FUSED_MC2", "ALLTOALL")
        ),
        *(
            Path(Case(scheme=name), [release for release in ALL if name in SCHEMES[release]])
            for name in sorted({name for of_release in SCHEMES.values() for name in of_release})
        ),
    ]
