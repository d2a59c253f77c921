"""compat.cpu.lend: lends what is missing for the length of a block, and takes back all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from npu_replay.compat import cpu
from npu_replay.compat.patching import patches

OWNERS = (torch, torch.cuda, torch.Tensor, dist)


def snapshot() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(owner).items()} for owner in OWNERS]


def test_everything_that_was_lent_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA, wherever this runs, and without Megatron, which takes seconds to be imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "_module", lambda name: None)
    before = snapshot()  # other shims may be on
    applied = patches.applied()
    with pytest.raises(KeyError), cpu.lend():
        assert snapshot() != before
        assert patches.applied() != applied
        lent = snapshot()
        with cpu.lend():
            assert snapshot() == lent
        assert snapshot() == lent, "the outermost takes back"
        raise KeyError
    assert snapshot() == before
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
