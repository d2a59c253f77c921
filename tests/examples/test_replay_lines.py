"""examples/verl/replay_lines.py asks what is installed, in simulated images; a page has what it prints."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ascend_images
from ascend_images import Image

V091, MAIN, A5, _, SGLANG, V080, V071, V070 = ascend_images.VERL_IMAGES
WITHOUT_VERL = ascend_images.OTHER_IMAGES[0]
IN_CHINESE = re.compile("[\u4e00-\u9fff]。")
ENV = "+ray_kwargs.ray_init.runtime_env.env_vars"
MODULES = f"{ENV}.VERL_USE_EXTERNAL_MODULES"
ONE_MODULE = f"{MODULES}=npu_replay"
LIB = "actor_rollout_ref.model.external_lib=npu_replay"
BRIDGE = "actor_rollout_ref.actor.megatron.vanilla_mbridge"
R2 = "R2 megatron npu"
R3 = "--words R3 megatron npu"
MISSING = "is missing"
CLONE = "is a clone on the path"


@pytest.mark.parametrize("image", ascend_images.VERL_IMAGES, ids=lambda image: image.name)
def test_it_says_in_which_image_it_runs(image: Image, tmp_path: Path) -> None:
    done = ascend_images.run_replay_lines(ascend_images.with_npu_replay(image, tmp_path), *R2.split())
    line = done.stderr.splitlines()[0]
    patterns = line.split("verl's image ")[1].split(": ")[0].split(" or ")
    assert all(any(fnmatch(tag, pattern) for pattern in patterns) for tag in image.tags)
    products = line.split(": ", 2)[2].split(", ")
    assert {f"Megatron-core {image.megatron_core}", "MindSpeed"} <= {*products}
    assert ("no mbridge" in products) == (not image.mbridge)


@pytest.mark.parametrize(
    ("image", "asked", "variables", "printed", "absent", "why"),
    [
        # verl 0.9.1 takes Megatron-Bridge by itself, older ones mbridge; main knows Megatron-Bridge alone.
        (V091, R2, {}, LIB, "mbridge", ""),
        (replace(V091, mbridge="0.15.1"), R2, {}, LIB, "mbridge", ""),
        (replace(V091, mbridge="0.15.1", megatron_bridge=""), R2, {}, f"{BRIDGE}=True", "", ""),
        (V080, R2, {}, LIB, "mbridge", ""),
        (replace(V080, mbridge=""), R2, {}, f"{BRIDGE}=False", "", ""),
        (V071, R2, {}, LIB, "mbridge", ""),
        (MAIN, R2, {}, LIB, "mbridge", ""),
        (SGLANG, R2, {}, LIB, "mbridge", "Megatron-Bridge, which isn't installed"),
        (SGLANG, f"--words {R2}", {}, "", "", "Megatron-Bridge, which isn't installed"),
        (A5, R2, {}, LIB, "mbridge", "Megatron-Bridge or mbridge, which isn't installed"),
        (A5, "R2 fsdp2 npu", {}, LIB, "mbridge", ""),
        # Modules that the image imports are kept.
        (V091, R3, {CLONE: ""}, ONE_MODULE, "", ""),
        (V091, R3, {CLONE: "", "VERL_USE_EXTERNAL_MODULES": "npu_replay"}, ONE_MODULE, "", ""),
        (V091, R3, {CLONE: "", "VERL_USE_EXTERNAL_MODULES": "b"}, f"{MODULES}='b,npu_replay'", "", ""),
        # vLLM loads the plug-ins that a list names, and all where there is no list.
        (V091, R3, {"VLLM_PLUGINS": "ascend"}, f"{ENV}.VLLM_PLUGINS='ascend,npu_replay'", "", ""),
        (V091, R3, {"VLLM_PLUGINS": ""}, f"{ENV}.VLLM_PLUGINS=npu_replay", "", ""),
        (V091, R3, {"VLLM_PLUGINS": "ascend,npu_replay"}, LIB, "VLLM_PLUGINS", ""),
        (V091, R3, {}, LIB, "VLLM_PLUGINS", ""),
        (V091, "R3 megatron cuda", {"VLLM_PLUGINS": "ascend"}, LIB, "VLLM_PLUGINS", ""),
        # verl finds an installed npu_replay by its entry points from 0.9 on, unless they are switched off.
        (V091, R3, {}, LIB, MODULES, ""),
        (V091, R3, {"VERL_USE_EXTERNAL_PLUGINS": "npu_replay, other"}, LIB, MODULES, ""),
        (V091, R3, {"VERL_USE_EXTERNAL_PLUGINS": "other"}, ONE_MODULE, "AUTOLOAD", ""),
        (V091, R3, {"NPU_REPLAY_AUTOLOAD": "0"}, ONE_MODULE, "", ""),
        (V091, R3, {"NPU_REPLAY_AUTOLOAD": "0"}, f"{ENV}.NPU_REPLAY_AUTOLOAD=on", "", ""),
        (V080, R3, {}, ONE_MODULE, "", ""),
        (V080, R2, {}, LIB, MODULES, ""),  # external_lib is enough
        # What can't work ends with its reason, and what may hang is told.
        (WITHOUT_VERL, R3, {}, "", "", "verl isn't installed here"),
        (V071, R3, {}, "", "", "no routes before 0.18. Take R2"),
        (V070, "R2 fsdp2 npu", {}, "", "", "verl 0.7.0 replays on Megatron alone"),
        (replace(V091, vllm="0.18.0"), R3, {}, "", "", "verl 0.9 refuses R3 with vLLM below 0.22"),
        (replace(V091, vllm_ascend="0.31.0"), R3, {}, "", "", "captures on vllm-ascend 0.18 to 0.30"),
        (replace(V091, vllm=""), R3, {}, "", "", "neither vLLM nor SGLang is installed here"),
        (replace(V091, torch_npu=""), f"--words {R2}", {}, "", "", "no image for NPUs"),
        (replace(V091, torch_npu=""), R2, {}, LIB, "", "torch_npu isn't installed here"),
        (V071, "R2 fsdp2 npu", {}, LIB, "", "transformers 4 may hang under FSDP2"),
        (V091, R2, {MISSING: ""}, LIB, "", "npu_replay isn't installed here"),
        (V091, f"--words {R2}", {MISSING: ""}, "", "", "npu_replay isn't installed here"),
        (V091, R2, {CLONE: ""}, LIB, "", ""),
    ],
)
def test_what_is_printed_and_what_is_wrong(
    image: Image, asked: str, variables: dict[str, str], printed: str, absent: str, why: str, tmp_path: Path
) -> None:
    """A line that is printed, or the script ends; a word in none of the lines; why, in Chinese too."""
    environment = {name: value for name, value in variables.items() if name not in (MISSING, CLONE)}
    if MISSING in variables:
        ascend_images.make(image, tmp_path)
    else:
        ascend_images.with_npu_replay(image, tmp_path, installed=CLONE not in variables)
    done = ascend_images.run_replay_lines(tmp_path, *asked.split(), **environment)
    assert done.returncode == (0 if printed else 1), done.stderr
    lines = done.stdout.replace(" \\\n", "\n").splitlines()
    assert printed in lines if printed else not lines
    assert not absent or absent not in done.stdout
    assert why in done.stderr
    assert bool(IN_CHINESE.search(done.stderr)) == bool(why)


@pytest.mark.parametrize("image", [V091, SGLANG, V080, V071], ids=lambda image: image.name)
def test_a_shell_makes_the_words_of_what_is_pasted(image: Image, tmp_path: Path) -> None:
    """With all quotes that there may be; bash takes the lines of one for a command's arguments."""
    folder = ascend_images.with_npu_replay(image, tmp_path, installed=False)
    asked = ("R2" if image is V071 else "R3", "fsdp2", "npu")
    modules = {"VERL_USE_EXTERNAL_MODULES": "megatron_adaptor,other"}
    ran = [ascend_images.run_replay_lines(folder, *how, *asked, **modules) for how in ((), ("--words",))]
    assert [done.returncode for done in ran] == [0, 0]
    lines, words = (done.stdout for done in ran)
    command = ["bash", "-c", f"printf '%s\\n' {lines}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == words
    assert (image is V071) == ("'" not in words)


# The page

PAGE = (Path(__file__).parents[2] / "docs" / "verl-ascend.md").read_text(encoding="utf-8")
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
    table = {row[-1].strip("`"): dict(zip(("R2", "R3"), row[2:4], strict=True)) for row in rows_of_the_page()}
    images_of: dict[str, set[str]] = {block: set() for _, block in BLOCKS}
    for image in ascend_images.VERL_IMAGES:
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
            assert table[image.name][mode] == words[" ".join(runs)], (image.name, mode)
    for label, block in BLOCKS:
        assert images_of[block], f"no image prints this: {label}"
        if (match := re.search(r"CANN ([\d.]+)", label)) is not None:
            assert images_of[block] == {match[1]}
