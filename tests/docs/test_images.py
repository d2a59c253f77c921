"""What the pages and scripts say of Ascend's images is what tests/ascend_images.py has of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ascend_images
import image_lines
from ascend_images import VERL_IMAGES, Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl-ascend.md").read_text(encoding="utf-8")
BLOCKS = [
    (label, block)
    for label, block in re.findall(r"([^\n]+)\n\n```bash\n(.*?)```", PAGE, re.DOTALL)
    if "external_lib" in block
]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for pattern in ("README*.md", "docs/*.md", "docs/zh/*.md", "examples/**/*.md", "examples/**/*.sh")
    for path in ROOT.glob(pattern)
}
GONE = ("vanilla_mbridge", "grad_offload")
"""Keys that verl main has no longer. Where an image needs one, replay_lines.py prints it there."""


def row_of(image: Image) -> list[str]:
    """What the page's table says of an image, but for R2 and R3."""
    rollout = f"SGLang {image.sglang}" if image.sglang else f"vllm-ascend {image.vllm_ascend}"
    bridges = [f"Megatron-Bridge {image.megatron_bridge}"] if image.megatron_bridge else []
    bridges += ["mbridge"] if image.mbridge else []
    return [
        image.cann + (" (A5)" if "-950-" in image.name else ""),
        image.verl,
        rollout,
        f"{image.megatron}, {image.mindspeed}",
        f"{image.megatron_adaptor}, {image.transformer_engine_npu}" if image.megatron_adaptor else "none",
        ", ".join(bridges) or "none",
        f"{image.python}, {image.torch_npu}",
        f"`{image.name}`",
    ]


def rows_of_the_page() -> list[list[str]]:
    """One for each image: a row may be for several, which differ by verl and tag."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "ubuntu" in line]
    rows = []
    for cann, verl, *cells, tags in ([*line.strip("| ").split(" | ")] for line in lines):
        for release, tag in zip(verl.split(", "), tags.split(", "), strict=True):
            rows.append([cann, release, *cells, tag])
    return rows


def test_the_table_is_that_of_the_images() -> None:
    told = [[*row[:2], *row[4:]] for row in rows_of_the_page()]
    assert sorted(told) == sorted(row_of(image) for image in VERL_IMAGES)
    assert f"verl's images on {ascend_images.READ}" in PAGE
    assert f"[supported_tags.md]({ascend_images.SUPPORTED_TAGS}) of {ascend_images.SUPPORTED_TAGS_OF}" in PAGE
    for image in VERL_IMAGES:
        others = {tag.replace("-a3-", "-910b-") for tag in image.tags}
        assert others == {image.name}, "those of A3 have a3 in the place of 910b"


@pytest.mark.slow
def test_each_image_prints_its_block_and_runs_what_the_table_says(tmp_path: Path) -> None:
    told = {row[-1].strip("`"): dict(zip(("R2", "R3"), row[2:4], strict=True)) for row in rows_of_the_page()}
    images_of: dict[str, set[str]] = {block: set() for _, block in BLOCKS}
    for image in VERL_IMAGES:
        folder = image_lines.made(image, tmp_path / image.name)
        for mode in ("R2", "R3"):
            runs = []
            for trainer in ("megatron", "fsdp2"):
                done = image_lines.run(folder, mode, trainer, "npu")
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


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_to_copy_has_what_the_newest_images_lack(name: str) -> None:
    text = TEXTS[name]
    code = text if name.endswith(".sh") else "\n".join(re.findall(r"```\w+\n(.*?)```", text, re.DOTALL))
    for key in GONE:
        assert key not in code
    assert not re.search(r"\b(import|install)\b[^\n]*[ =]mbridge\b", code)
