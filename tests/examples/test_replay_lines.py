"""examples/verl/replay_lines.py asks what is installed, in simulated images."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ascend_images
import image_lines

V091, MAIN, A5, _, SGLANG, V080, V071, V070 = ascend_images.VERL_IMAGES
IMAGES = pytest.mark.parametrize("image", ascend_images.VERL_IMAGES, ids=lambda image: image.name)
BRIDGE = "actor_rollout_ref.actor.megatron.vanilla_mbridge"
IN_CHINESE = re.compile("[\u4e00-\u9fff]。")
ENV = "+ray_kwargs.ray_init.runtime_env.env_vars"
MODULES = f"{ENV}.VERL_USE_EXTERNAL_MODULES"
AUTOLOAD_ON = f"{ENV}.NPU_REPLAY_AUTOLOAD=on"


@IMAGES
def test_it_says_in_which_image_it_runs(image: ascend_images.Image, tmp_path: Path) -> None:
    done = image_lines.run(image_lines.made(image, tmp_path), "R2", "megatron", "npu")
    told = done.stderr.splitlines()[0]
    patterns = told.split("verl's image ")[1].split(": ")[0].split(" or ")
    assert all(any(fnmatch(tag, pattern) for pattern in patterns) for tag in image.tags)
    products = told.split(": ", 2)[2].split(", ")
    assert f"Megatron-core {image.megatron_core}" in products
    assert "MindSpeed" in products, "and not its version, which is 0.12.1 on newer branches"
    assert ("MegatronAdaptor 0.1.0" in products) == bool(image.megatron_adaptor)
    assert ("no mbridge" in products) == (not image.mbridge)
    assert ("no Megatron-Bridge" in products) == (not image.megatron_bridge)


@pytest.mark.parametrize("image", ascend_images.OTHER_IMAGES, ids=lambda image: image.name)
def test_without_verl_it_says_so(image: ascend_images.Image, tmp_path: Path) -> None:
    done = image_lines.run(image_lines.made(image, tmp_path), "R3", "megatron", "npu")
    assert done.returncode == 1
    assert not done.stdout
    assert "verl isn't installed here" in done.stderr
    assert IN_CHINESE.search(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "line"),
    [
        (V091, ""),
        (replace(V091, mbridge="0.15.1"), ""),
        (replace(V091, mbridge="0.15.1", megatron_bridge=""), f"{BRIDGE}=True"),
        (V080, ""),
        (replace(V080, mbridge=""), f"{BRIDGE}=False"),
        (V071, ""),
        (MAIN, ""),
        (SGLANG, "Megatron-Bridge, which isn't installed"),
        (A5, "Megatron-Bridge or mbridge, which isn't installed"),
    ],
    ids=range(9),
)
def test_the_bridge_is_the_one_that_is_installed(
    image: ascend_images.Image, line: str, tmp_path: Path
) -> None:
    """verl 0.9.1 takes Megatron-Bridge by itself, older ones mbridge; main knows Megatron-Bridge alone."""
    folder = image_lines.made(image, tmp_path)
    done = image_lines.run(folder, "R2", "megatron", "npu")
    assert done.returncode == 0
    bridges = [word.removesuffix(" \\") for word in done.stdout.splitlines() if "mbridge" in word]
    assert bridges == ([line] if line.startswith(BRIDGE) else [])
    is_told = "which isn't installed" in done.stderr
    assert is_told == ("which" in line) == bool(IN_CHINESE.search(done.stderr))
    assert not line.startswith("Megatron-Bridge") or line in done.stderr
    for_a_script = image_lines.run(folder, "--words", "R2", "megatron", "npu")
    assert (for_a_script.returncode, for_a_script.stdout == "") == ((1, True) if is_told else (0, False))
    assert "mbridge" not in image_lines.printed(folder, "R2", "fsdp2", "npu")


@pytest.mark.parametrize(
    ("there", "value"),
    [
        ("", "npu_replay"),
        ("npu_replay", "npu_replay"),
        ("megatron_adaptor", "'megatron_adaptor,npu_replay'"),
        ("npu_replay,megatron_adaptor", "'npu_replay,megatron_adaptor'"),
    ],
)
def test_modules_that_the_image_imports_are_kept(there: str, value: str, tmp_path: Path) -> None:
    folder = image_lines.made(V091, tmp_path, installed=False)
    told = image_lines.printed(folder, "--words", "R3", "megatron", "npu", VERL_USE_EXTERNAL_MODULES=there)
    assert f"{MODULES}={value}" in told.splitlines()


@pytest.mark.parametrize(
    ("there", "value"), [("ascend", "'ascend,npu_replay'"), ("", "npu_replay"), ("ascend,npu_replay", "")]
)
def test_a_list_of_vllms_plugins_gets_npu_replay(there: str, value: str, tmp_path: Path) -> None:
    """vLLM loads what the list names, and all where there is no list."""
    folder = image_lines.made(V091, tmp_path)
    asked = ("--words", "R3", "megatron", "npu")
    told = image_lines.printed(folder, *asked, VLLM_PLUGINS=there).splitlines()
    assert [line for line in told if "VLLM_PLUGINS" in line] == [f"{ENV}.VLLM_PLUGINS={value}"] * bool(value)
    assert "VLLM_PLUGINS" not in image_lines.printed(folder, *asked)
    assert "VLLM_PLUGINS" not in image_lines.printed(folder, *asked[:3], "cuda", VLLM_PLUGINS=there)


def test_an_installed_npu_replay_needs_no_module(tmp_path: Path) -> None:
    """verl finds it by its entry points from 0.9 on, unless they are switched off; a clone has none."""
    asked = ("--words", "R3", "megatron", "npu")
    newest = image_lines.made(V091, tmp_path / "newest")
    assert MODULES not in image_lines.printed(newest, *asked)
    assert MODULES not in image_lines.printed(newest, *asked, VERL_USE_EXTERNAL_PLUGINS="npu_replay, other")
    for plugins in ("none", "other"):
        assert MODULES in image_lines.printed(newest, *asked, VERL_USE_EXTERNAL_PLUGINS=plugins)
    switched_off = image_lines.printed(newest, *asked, NPU_REPLAY_AUTOLOAD="0")
    assert MODULES in switched_off
    assert AUTOLOAD_ON in switched_off, "capture is an entry point of vLLM's"
    assert AUTOLOAD_ON not in image_lines.printed(newest, *asked)
    older = image_lines.made(V080, tmp_path / "older")
    assert MODULES in image_lines.printed(older, *asked)
    assert MODULES not in image_lines.printed(older, "R2", "megatron", "npu"), "external_lib does"


@pytest.mark.parametrize(
    ("image", "asked", "why"),
    [
        (V071, ("R3", "megatron"), "no routes before 0.18. Take R2"),
        (V070, ("R3", "megatron"), "no routes before 0.18. Take R2"),
        (V070, ("R2", "fsdp2"), "verl 0.7.0 replays on Megatron alone"),
        (replace(V091, vllm="0.18.0"), ("R3", "megatron"), "verl 0.9 refuses R3 with vLLM below 0.22"),
        (replace(V091, vllm_ascend="0.31.0"), ("R3", "fsdp2"), "captures on vllm-ascend 0.18 to 0.30"),
        (replace(V091, vllm=""), ("R3", "megatron"), "neither vLLM nor SGLang is installed here"),
        (replace(V091, torch_npu=""), ("--words", "R2", "megatron"), "no image for NPUs"),
    ],
    ids=range(7),
)
def test_what_cannot_work_ends_with_its_reason(
    image: ascend_images.Image, asked: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    done = image_lines.run(image_lines.made(image, tmp_path), *asked, "npu")
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    assert IN_CHINESE.search(done.stderr)


def test_what_may_hang_and_what_is_no_image_is_told(tmp_path: Path) -> None:
    told = image_lines.run(image_lines.made(V071, tmp_path / "old"), "R2", "fsdp2", "npu").stderr
    assert "transformers 4 may hang under FSDP2" in told
    assert IN_CHINESE.search(told)
    newest = image_lines.run(image_lines.made(V091, tmp_path / "new"), "R3", "fsdp2", "npu").stderr
    assert "transformers 4" not in newest
    nowhere = image_lines.made(replace(V091, torch_npu=""), tmp_path / "elsewhere")
    told = image_lines.run(nowhere, "R2", "megatron", "npu").stderr
    assert "torch_npu isn't installed here" in told
    assert "looks like verl's image" not in told


def test_where_npu_replay_is_missing_it_says_so(tmp_path: Path) -> None:
    """Neither an installed one is missing, nor one that is on PYTHONPATH alone."""
    asked = ("R2", "megatron", "npu")
    folder = tmp_path / "without"
    ascend_images.make(V091, folder)
    done = image_lines.run(folder, *asked)
    assert "npu_replay isn't installed here" in done.stderr
    assert IN_CHINESE.search(done.stderr)
    assert done.stdout
    for_a_script = image_lines.run(folder, "--words", *asked)
    assert (for_a_script.returncode, for_a_script.stdout) == (1, "")
    assert "npu_replay isn't installed here" in for_a_script.stderr
    clone = image_lines.made(V091, tmp_path / "clone", installed=False)
    for there in (clone, image_lines.made(V091, tmp_path / "with")):
        assert "npu_replay isn't" not in image_lines.run(there, *asked).stderr


@pytest.mark.parametrize("image", [V091, SGLANG, V080, V071], ids=lambda image: image.name)
def test_a_shell_makes_the_words_of_what_is_pasted(image: ascend_images.Image, tmp_path: Path) -> None:
    """With all quotes that there may be; bash takes the lines of one for a command's arguments."""
    folder = image_lines.made(image, tmp_path, installed=False)
    mode = "R2" if image is V071 else "R3"
    for trainer in ("fsdp2",) if image is SGLANG else ("megatron", "fsdp2"):  # which has no bridge
        asked = (mode, trainer, "npu")
        modules = {"VERL_USE_EXTERNAL_MODULES": "megatron_adaptor,other"}
        lines = image_lines.printed(folder, *asked, **modules)
        words = image_lines.printed(folder, "--words", *asked, **modules)
        pasted = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {lines}"], capture_output=True, text=True, check=True
        )
        assert pasted.stdout == words
        assert (mode == "R2") == ("'" not in words)
