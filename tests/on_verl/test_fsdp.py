"""verl's own FSDP engine and workers: FSDP2 over gloo, one process and two. fsdp_cases.py says what runs.

Not run, for want of what they take: FSDP1 (torch syncs a model's states between devices alone, and verl asks
for it; FSDP1 by itself: tests/distributed/test_fsdp2.py), activation offload (pinned memory), flash-attn,
whose sequence-parallel attention the ids don't depend on.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from on_verl.launches import Notes, check, noted

ALONE = ("R2: packed, recompute", "R3: padded, recompute", "without its adapter")
BY_RELEASE = (
    *("R2: packed, recompute", "R3: padded", "R2: dynamic, recompute"),
    *("R3: sp2", "R2: sp2, dynamic, recompute"),
    "mini-batches and epochs",
    "R2 by reference",
    "R3 by reference",
)
"""Where verl's own code differs from release to release."""
ALIKE = (
    *("R3: packed", "R2: padded, recompute", "R3: dynamic", "R2: to a length"),
    *("R2: sp2, recompute", "R3: sp2, dynamic", "R3: sp2, to a length, recompute"),
    "without replay it would have differed",
    "without its adapter",
    "one rank has bad routes in the first step",
    "routes are missing",
    "a record changes nothing",
    "gradients of one process",
    "more experts than a byte holds",
    "a checkpoint in between",
    "routes in files",
    "a sample without routes",
    "bad samples after the first step",
    "routes far from the routers' own choice",
    "one rank fails in a way that nobody has thought of",
    "images, which are cut after their embedding",
    "a model without experts",
    "uninstalled and installed again",
)
WAYS = ("packed", "padded", "dynamic", "to a length", "sp2", "sp2, dynamic", "sp2, to a length")
EVERY = [f"{mode}: {way}{also}" for mode in ("R2", "R3") for way in WAYS for also in ("", ", recompute")]
REST = [case for case in EVERY if case not in {*BY_RELEASE, *ALIKE}]
"""The other ways, which `ci/verl.sh --all` runs."""

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
if version("verl") >= "0.9":
    ENV = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_live.cpu_platform,npu_replay"}
else:
    ENV = {"VERL_USE_EXTERNAL_MODULES": "npu_replay"}
IMAGES = [pytest.param("the same question about other images", marks=pytest.mark.newest)]
"""Of a model of transformers 5."""
newest = [pytest.param(case, marks=pytest.mark.newest) for case in ALIKE]
rest = [
    pytest.param(case, marks=pytest.mark.newest) for case in REST if os.environ.get("NPU_REPLAY_VERL_ALL")
]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "fsdp_cases", ranks=1, env=ENV)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "fsdp_cases", ranks=2, env=ENV)


@pytest.mark.parametrize(
    "case", [*ALONE, pytest.param("mini-batches and epochs", marks=pytest.mark.newest), *IMAGES]
)
def test_verls_own_fsdp_engine_alone(alone: Notes, case: str) -> None:
    check(alone, case)


@pytest.mark.parametrize("case", [*BY_RELEASE, *newest, *rest])
def test_verls_own_fsdp_engine_in_two_processes(together: Notes, case: str) -> None:
    check(together, case)


@pytest.fixture(scope="module")
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "fsdp_cases", ranks=2, env=ENV)


@pytest.mark.skipif(
    version("verl").startswith("0.8"), reason="its patches want transformers 5, and its block transformers 4"
)
@pytest.mark.parametrize("case", ["verl's block for an NPU"])
def test_verls_own_fsdp_engine_with_its_block_for_an_npu(patched: Notes, case: str) -> None:
    check(patched, case)
