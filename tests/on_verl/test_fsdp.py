"""verl's own FSDP engine and workers: FSDP2 over gloo, in two processes. fsdp_cases.py says what runs.

Not run, for want of what they take: FSDP1 (torch syncs a model's states between devices alone, and verl asks
for it; FSDP1 by itself: tests/distributed/test_fsdp2.py), activation offload (pinned memory), flash-attn,
whose sequence-parallel attention the ids don't depend on.

Each release packs in each way at least once; the rest is `long`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from case_jobs import Notes, check, noted

NPU_BLOCK = "verl's block for an NPU"
"""It stays in the process, so it comes last."""
BY_RELEASE = "R3: padded"
AT_BOTH_ENDS = ("R2: dynamic, recompute", "R3: sp2")
FROM_0_8 = ("R2: sp2, dynamic, recompute", "R3 by reference")  # dynamic, too
ALIKE = (
    *("R2: sp2, to a length, recompute", "R2 by reference"),
    "without its adapter",
    "more experts than a byte holds",
    "bad samples after the first step",
    "one rank fails in a way that nobody has thought of",
    "images, which are cut after their embedding",
    "the same question about other images",  # with a model of transformers 5
    "a model without experts",
)
WAYS = ("packed", "padded", "dynamic", "to a length", "sp2", "sp2, dynamic", "sp2, to a length")
EVERY = [f"{mode}: {way}{also}" for mode in ("R2", "R3") for way in WAYS for also in ("", ", recompute")]
RELEASE = version("verl")
IS_NEWEST = RELEASE >= "0.9"

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
ENV = {"VERL_USE_EXTERNAL_MODULES": "npu_replay"}
if IS_NEWEST:
    ENV = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_live.cpu_platform,npu_replay"}


def _here() -> list[Any]:
    between = [pytest.mark.long] * RELEASE.startswith("0.8")
    cases: list[Any] = [pytest.param(case, marks=between) for case in AT_BOTH_ENDS]
    here = [BY_RELEASE, *(() if RELEASE < "0.8" else FROM_0_8), *(ALIKE if IS_NEWEST else ())]
    rest = [case for case in EVERY if case not in {*AT_BOTH_ENDS, *here}]
    cases += [*here, *(pytest.param(case, marks=[pytest.mark.long, pytest.mark.newest]) for case in rest)]
    # 0.8's patches want transformers 5, and its block transformers 4.
    return [*cases, *([] if between else [NPU_BLOCK])]


@pytest.fixture(scope="module")
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """What both ranks noted of each case that was selected."""
    workers = ("verl.workers.engine_workers",)
    return noted(request, tmp_path_factory, "on_verl.fsdp_cases", ranks=2, imports=workers, env=ENV)


@pytest.mark.parametrize("case", _here())
def test_verls_own_fsdp_engine_in_two_processes(notes: Notes, case: str) -> None:
    check(notes, case)
