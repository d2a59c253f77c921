"""compat.mindspeed.adaptors: what is said of MindSpeed and MegatronAdaptor, on simulated images.

Nothing is imported: the verdicts are read off folders. That they are right was tried with the real branches
of MindSpeed, each with each Megatron-LM (docs/dev/tried.md).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ascend_images
from ascend_images import IMAGES, Image
from npu_replay.compat import probe
from npu_replay.compat.mindspeed import adaptors
from npu_replay.compat.probe import ADAPTOR, TE_NPU, Capability

NEWEST = ascend_images.image("latest-vllm-910b-ubuntu")
OF_0_12 = ascend_images.image("verl-8.5.0-910b-ubuntu22.04-py3.11-v0.7.1")


def capability(name: str = adaptors.UNDER_MINDSPEED) -> Capability:
    return next(entry for entry in adaptors.capabilities(probe.products()) if entry.name == name)


def versions() -> dict[str, str]:
    return {product.name: product.version for product in probe.products() if product.installed}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_what_an_image_has_goes_together_under_its_own_names(path: Path, image: Image) -> None:
    ascend_images.make(image, path)
    under = capability()
    assert under.state == ("works" if image.mindspeed else "missing"), under
    assert capability(adaptors.UNDER_ADAPTOR).state == ("works" if image.megatron_adaptor else "missing")
    assert ("core_r0.17.0 or later" in under.why) == (image.mindspeed == "core_r0.18.0")
    assert ("a wheel doesn't have" in under.why) == image.megatron_wheel
    expected = [("megatron_adaptor", image.megatron_adaptor), ("mindspeed.megatron_adaptor", image.mindspeed)]
    assert adaptors.before_megatron(probe.products()) == tuple(name for name, there in expected if there)
    packages = versions()
    assert packages["megatron-core"] == image.megatron_core
    assert "transformer-engine" not in packages, "that name is NVIDIA's"
    assert packages.get(TE_NPU, "") == ("2.13.0" if image.transformer_engine_npu else "")
    assert packages.get("mindspeed", "") == image.mindspeed_says
    there = {
        ADAPTOR: image.megatron_adaptor,
        "MindSpeed-Bridge": image.mindspeed_bridge,
        "Megatron-Bridge": image.megatron_bridge,
        "MindSpeed-Ops": image.mindspeed_ops,
        "mbridge": image.mbridge,
        "vllm-ascend": image.vllm_ascend,
        "sglang": image.sglang,
        "verl": image.verl,
        "torch_npu": image.torch_npu,
    }
    for name, version in there.items():
        assert bool(packages.get(name)) == bool(version), name


def _without(*packages: str) -> Any:
    def change(path: Path) -> None:
        for name in packages:
            shutil.rmtree(path / name)

    return change


def _nvidias_engine(path: Path) -> None:
    (path / "transformer_engine" / "__init__.py").write_text('"""Top level package"""\n', encoding="utf-8")


@pytest.mark.parametrize(
    ("image", "change", "why", "remedy"),
    [
        (NEWEST, _without("megatron_adaptor"), "needs MegatronAdaptor: not installed", "gitcode.com/Ascend"),
        (NEWEST, _without("transformer_engine"), f"needs {TE_NPU}: not installed", "TransformerEngineNPU of"),
        (NEWEST, _nvidias_engine, f"needs {TE_NPU}: not installed", "pip uninstall transformer_engine"),
        (
            NEWEST,
            _without("megatron_adaptor", "transformer_engine"),
            f"needs MegatronAdaptor and {TE_NPU}: not installed",
            "gitcode.com/Ascend",
        ),
        (
            replace(OF_0_12, megatron_core="0.18.0"),
            None,
            "made for Megatron-core 0.12.1, and 0.18.0 is here",
            "the branch of MindSpeed that is named after this Megatron-core",
        ),
        (
            replace(OF_0_12, mindspeed="dev", mindspeed_says="0.14.1", megatron_core="0.16.0"),
            None,
            "made for Megatron-core 0.14.1, and 0.16.0 is here",
            "the branch of MindSpeed",
        ),
    ],
)
def test_what_does_not_go_together_is_broken_and_the_remedy_says_what_to_take(
    path: Path, image: Image, change: Any, why: str, remedy: str
) -> None:
    ascend_images.make(image, path)
    if change is not None:
        change(path)
    entry = capability()
    assert entry.state == "broken"
    assert why in entry.why
    assert remedy in entry.remedy


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (replace(NEWEST, megatron_core="0.17.1"), "0.12.1"),
        (replace(NEWEST, megatron_core="0.19.2"), "0.12.1"),
        (replace(NEWEST, megatron_core="0.17.1"), "26.2.0"),
        (replace(OF_0_12, megatron_core="0.12.3"), "0.12.1"),
    ],
)
def test_a_version_that_says_nothing_breaks_nothing(path: Path, image: Image, says: str) -> None:
    ascend_images.make(replace(image, mindspeed_says=says), path)
    assert capability().state == "works"


def test_a_source_tree_without_metadata_says_its_version_in_setup_py(path: Path) -> None:
    ascend_images.make(replace(OF_0_12, megatron_core="0.18.0"), path)
    shutil.rmtree(next(path.glob("mindspeed-*.dist-info")))
    assert (versions()["mindspeed"], capability().state) == ("", "works"), "nothing says what it is for"
    (path / "setup.py").write_text("__version__ = '3.1'\n__package_name__ = 'other'\n", encoding="utf-8")
    assert versions()["mindspeed"] == "", "somebody else's"
    text = "__version__ = '0.12.1'\n__package_name__ = 'mindspeed'\n"
    (path / "setup.py").write_text(text, encoding="utf-8")
    assert (versions()["mindspeed"], capability().state) == ("0.12.1", "broken")
