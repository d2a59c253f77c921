"""Draws docs/images/layouts.png: where TokenLayout puts the tokens of two sequences, road by road.

Every cell is read off a TokenLayout, so the picture can't say anything else than the code does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from npu_replay import ParallelLayout, TokenLayout

LENGTHS = (7, 4)
NAMES = "abcdefgwxyz"
COLOURS = ("#2f6db3", "#d9822b")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "layouts.png"

padded = TokenLayout.padded
packed = TokenLayout.packed
Road = tuple[str, Callable[..., TokenLayout], dict[str, Any], dict[str, int]]
ROADS: tuple[Road, ...] = (
    # title, constructor, its arguments, the sizes of the parallel axes
    ("padded(lengths, 8): Megatron, sequence-major", padded, {"length": 8}, {}),
    ("padded(lengths, 8, side='left')", padded, {"length": 8, "side": "left"}, {}),
    ("padded(lengths, 8, order='batch'): Hugging Face", padded, {"length": 8, "order": "batch"}, {}),
    ("packed(lengths, align=4, align_end=16)", packed, {"align": 4, "align_end": 16}, {}),
    ("padded, tp 2, sequence parallel", padded, {}, {"tp": 2}),
    ("padded, tp 2, alltoall_seq: each router sees all rows", padded, {}, {"tp": 2, "gathers_rows": True}),
    ("padded, cp 2, zigzag", padded, {}, {"cp": 2}),
    ("padded, cp 2, contiguous", padded, {"context": "contiguous"}, {"cp": 2}),
    ("packed, cp 2, zigzag: every sequence is cut", packed, {}, {"cp": 2}),
    ("packed, cp 2, contiguous: the stream is cut", packed, {"context": "contiguous"}, {"cp": 2}),
    ("packed, cp 2, tp 2, sequence parallel", packed, {}, {"cp": 2, "tp": 2}),
    ("packed, cp 2, contiguous, tp 2", packed, {"context": "contiguous"}, {"cp": 2, "tp": 2}),
)


def main(picture: Path) -> None:
    """Draw all roads, two a line."""
    ranks = [_ranks(*road[1:]) for road in ROADS]
    heights = [max(map(len, pair)) + 1.1 for pair in zip(ranks[::2], ranks[1::2], strict=True)]
    figure = plt.figure(figsize=(8.6, 0.3 * sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for number, (road, layouts) in enumerate(zip(ROADS, ranks, strict=True)):
        at, column = divmod(number, 2)
        ax = figure.add_subplot(grid[at, column])
        for line, (name, layout) in enumerate(layouts):
            for row, token in enumerate(layout.rows.tolist()):
                colour = "#e4e4e4" if token < 0 else COLOURS[token >= LENGTHS[0]]
                ax.add_patch(plt.Rectangle((row, -line), 0.94, -0.86, color=colour, linewidth=0))
                if token >= 0:
                    place = {"ha": "center", "va": "center", "fontsize": 9}
                    ax.text(row + 0.47, -line - 0.45, NAMES[token], color="white", **place)
            ax.text(-0.25, -line - 0.45, name, ha="right", va="center", fontsize=8, color="#444444")
        ax.set(xlim=(-3.2, 16.2), ylim=(1 - heights[at], 0.15))
        ax.set_title(road[0], loc="left", fontsize=9, family="monospace")
        ax.axis("off")
    title = "The rows of each rank's router, in order: sequences abcdefg and wxyz, padding in grey"
    figure.suptitle(title, fontsize=11)
    figure.savefig(picture, dpi=110)


def _ranks(
    make: Callable[..., TokenLayout], arguments: dict[str, Any], sizes: dict[str, int]
) -> list[tuple[str, TokenLayout]]:
    """The layout of each rank of a context-parallel and a tensor-parallel group, by its name."""
    cp = sizes.get("cp", 1)
    tp = sizes.get("tp", 1)
    found = []
    for rank in range(cp * tp):
        ranks = {"cp_rank": rank // tp, "tp_rank": rank % tp}
        parallel = ParallelLayout(**sizes, **ranks, sequence_parallel=tp > 1)
        axes = (("cp", cp, rank // tp), ("tp", tp, rank % tp))
        name = " ".join(f"{axis}{number}" for axis, size, number in axes if size > 1)
        found.append((name, make(LENGTHS, **arguments, parallel=parallel)))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
