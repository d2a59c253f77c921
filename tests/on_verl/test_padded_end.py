"""verl pads packed rows for Ulysses as `follow` expects it: at their end, with positions from 0 on."""

from __future__ import annotations

import importlib

import pytest
import torch

from npu_replay.sessions.fed_sequences import fed_sequences

pytest.importorskip("transformers")

from sessions.test_follow import packed, texts
from sessions.test_padded_end import by_hand

pytestmark = pytest.mark.verl


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 36])
def test_its_padded_end_is_no_sequence(ranks: int) -> None:
    fed = packed(texts())[0]
    pad = importlib.import_module("verl.utils.ulysses").ulysses_pad
    ids, positions, size = pad(fed["input_ids"], fed["position_ids"], sp_size=ranks)
    expected = by_hand(fed["input_ids"], fed["position_ids"], ranks)
    assert all(map(torch.equal, (ids, positions), expected))
    found = fed_sequences({"input_ids": ids, "position_ids": positions}, {})
    assert found.padded == [False] * 5 + [True] * (size > 1)
