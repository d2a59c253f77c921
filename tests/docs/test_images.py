"""What docs/verl-ascend.md has for verl's images is what examples/verl/replay_lines.py prints in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ascend_images
from ascend_images import VERL_IMAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl-ascend.md").read_text(encoding="utf-8")
BLOCKS = [
    (label, block)
    for label, block in re.findall(r"([^\n]+)\n\n```bash\n(.*?)```", PAGE, re.DOTALL)
    if "external_lib" in block
]


def rows_of_the_page() -> list[list[str]]:
    """One for each image: a row may be for several, which differ by verl and tag."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "ubuntu" in line]
    return [
        [cann, release, *cells, tag]
        for cann, verl, *cells, tags in ([*line.strip("| ").split(" | ")] for line in lines)
        for release, tag in zip(verl.split(", "), tags.split(", "), strict=True)
    ]


@pytest.mark.slow
def test_each_image_prints_its_block_and_runs_what_the_table_says(tmp_path: Path) -> None:
    told = {row[-1].strip("`"): dict(zip(("R2", "R3"), row[2:4], strict=True)) for row in rows_of_the_page()}
    images_of: dict[str, set[str]] = {block: set() for _, block in BLOCKS}
    for image in VERL_IMAGES:
        folder = ascend_images.with_npu_replay(image, tmp_path / image.name)
        for mode in ("R2", "R3"):
            runs = []
            for trainer in ("megatron", "fsdp2"):
                done = ascend_images.run_replay_lines(folder, mode, trainer, "npu")
                if done.returncode == 0 and "which isn't installed" not in done.stderr:
                    runs.append(trainer)
                    lines = done.stdout.replace(" \\\ntrainer.use_legacy_worker_impl=disable", "")
                    shown = images_of.get(lines)
                    assert shown is not None or (image.cann, mode, trainer) == ("9.0.0", "R3", "fsdp2")
                    if shown is not None:
                        shown.add(image.cann)
            words = {"megatron fsdp2": "yes", "fsdp2": "FSDP2", "megatron": "Megatron", "": "no"}
            assert told[image.name][mode] == words[" ".join(runs)], (image.name, mode)
    for label, block in BLOCKS:
        assert images_of[block], f"no image prints this: {label}"
        if (said := re.search(r"CANN ([\d.]+)", label)) is not None:
            assert images_of[block] == {said[1]}
