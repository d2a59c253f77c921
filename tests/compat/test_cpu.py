"""compat.cpu.lend: lends what is missing for the length of a block, and takes back all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from npu_replay.compat import cpu
from npu_replay.compat.patching import patches

OWNERS = (torch, torch.cuda, torch.Tensor, dist)


def snapshot(*owners: Any) -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in owners]


def same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and all(a[name] is b[name] for name in a)
        for a, b in zip(before, after, strict=True)
    )


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA, wherever this runs, and no import of Megatron, which takes seconds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "_module", lambda name: None)


@pytest.mark.usefixtures("no_cuda")
def test_everything_that_was_lent_is_taken_back() -> None:
    before = snapshot(*OWNERS)  # other shims may be on
    applied = patches.applied()
    with pytest.raises(KeyError), cpu.lend():
        assert not same(before, snapshot(*OWNERS))
        assert patches.applied() != applied
        lent = snapshot(*OWNERS)
        with cpu.lend():
            assert same(lent, snapshot(*OWNERS))
        assert same(lent, snapshot(*OWNERS)), "the outermost takes back"
        raise KeyError
    assert same(before, snapshot(*OWNERS))
    assert patches.applied() == applied


@pytest.mark.megatron
def test_what_megatron_lacks_without_transformer_engine_is_lent_on_cuda_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "RouterGatingLinearFunction"):
        pytest.skip("0.12 doesn't ask for te_general_gemm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    with cpu.lend():
        assert moe_utils.te_general_gemm is None
    assert not hasattr(moe_utils, "te_general_gemm")
