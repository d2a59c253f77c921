"""What is measured of TokenLayout.gather: the routes of a rollout, into the rows of one pipeline stage.

Ragged sequences, shuffled rows, some layers of all. The yardstick is numpy's take of the same rows, given
what gather has to make first: one array with all sequences in it, and once even cut to the layers.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from benchmarks.timing import Way
from npu_replay import RoutedExperts, TokenLayout

SEQUENCES = 64
LENGTHS = (200, 2000)
LAYERS = 48
STAGE = range(12, 24)
TOPK = 8
EXPERTS = 128


def ways() -> list[Way]:
    """The ways to measure; numpy's come first."""
    samples, layout = rollout()
    whole = RoutedExperts.concat(samples).ids.numpy()
    cut = np.ascontiguousarray(whole[:, STAGE.start : STAGE.stop])
    rows = layout.rows.numpy()
    return [
        Way(f"take, all {LAYERS}", lambda: np.take(whole, rows, axis=0)),
        Way(f"take, cut to {len(STAGE)}", lambda: np.take(cut, rows, axis=0)),
        Way(f"gather {len(STAGE)} of {LAYERS}", lambda: layout.gather(samples, layers=STAGE)),
    ]


def tokens() -> int:
    """Tokens of all sequences."""
    return len(rollout()[1].rows)


def sizes() -> str:
    """Bytes of the routes as they are held and sent, in words."""
    samples, layout = rollout()
    whole = RoutedExperts.concat(samples)
    held = whole.ids.numel() * whole.ids.element_size() + len(whole)
    sent = len(whole.to_bytes())
    stage = len(layout.gather(samples, layers=STAGE).to_bytes())
    return (
        f"{len(samples)} sequences, {len(whole):,} tokens, {LAYERS} layers, top-{TOPK} of {EXPERTS}; "
        f"take is numpy's\n"
        f"bytes: {held:,} held ({held / len(whole):.1f} a token), {sent:,} sent in one piece, "
        f"{stage:,} to a rank with {len(STAGE)} of the layers"
    )


@functools.cache
def rollout() -> tuple[list[RoutedExperts], TokenLayout]:
    """The sequences' routes, and where their tokens go; made once."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*LENGTHS, (SEQUENCES,), generator=generator).tolist()
    samples = [
        RoutedExperts(
            ids=torch.rand(length, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices,
            layers=range(LAYERS),
            num_experts=EXPERTS,
        )
        for length in lengths
    ]
    return samples, TokenLayout(torch.randperm(sum(lengths), generator=generator), tuple(lengths))
