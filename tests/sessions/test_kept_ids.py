"""The dtype in which ids of routers' calls are kept for recomputes and records: none is folded."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from npu_replay.sessions.micro_batches import FEW, KeptIds


@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode], ids=["grad", "inference"])
@pytest.mark.parametrize("rows", [2, FEW + 1], ids=["few", "many"])
@pytest.mark.parametrize(("dtype", "largest"), [(torch.uint8, 255), (torch.int16, 299)])
def test_ids_keep_their_value_in_the_dtype_that_is_asked_for(
    around: type, rows: int, dtype: torch.dtype, largest: int
) -> None:
    with around():
        ids = torch.arange(rows * 2).remainder(largest + 1).reshape(rows, 2)
        ids[0, 0] = largest
    kept = KeptIds()
    kept.keep((0, 0), ids, dtype)
    found = kept.narrow()[0, 0]
    assert found.dtype == dtype
    assert found.tolist() == ids.tolist()
