"""The Ascend images that people run: what each has, and a folder that simulates one.

    make(image("v0.9.1-cann9.1.0-torch_npu2.10.0.post4-910b-ubuntu22.04-py3.12-vllm"), folder)

What pages, scripts and commands say of an image is held against IMAGES. The rows of verl are from
docker/ascend/supported_tags.md of verl-project/verl («Last updated: 09/28/2026») and the Dockerfiles that it
names, read on 2026-11-28. Tags «latest» are built anew: what they have is of that day. The rows without a tag
of verl are from the install scripts of each project, read on the same day.

A simulated image is a folder for PYTHONPATH: packages that hold what is looked up or read without an import,
beside the metadata of their distributions. Nothing in it computes, but for what a test gives: a release of
Megatron-core (.work), with which the stand-ins of what needs an NPU are taken.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Image:
    """What an image has. Empty text: it isn't installed, or (CANN) not said. «any»: its release isn't
    said, or it is the newest of that day.

    Attributes:
        tags: verl's, or the name of the project whose image or script it is.
        source: the Dockerfile or script that says so, in the repository of the project.
        cann, torch_npu: their releases.
        verl: its release; «main» where the image is built of that branch.
        vllm, vllm_ascend, sglang: their releases. Where vllm-ascend is built of a branch it may say a version
            of development, such as 0.23.1.dev3.
        megatron: the branch, tag or commit of Megatron-LM.
        megatron_core: what its package_info.py says.
        megatron_wheel: it is installed from git without its source tree: there is no megatron.training.
        mindspeed: the branch or commit of MindSpeed.
        mindspeed_says: the version in MindSpeed's metadata. It isn't always that of the Megatron-core for
            which it is made.
        megatron_adaptor, transformer_engine_npu, mindspeed_ops, mindspeed_bridge: the branch or commit.
        megatron_bridge: the release or commit of NVIDIA's Megatron-Bridge.
        mbridge: its release.
        transformers: its release; «main» for a commit of that branch.
    """

    tags: tuple[str, ...]
    source: str
    cann: str = ""
    torch_npu: str = ""
    verl: str = ""
    vllm: str = ""
    vllm_ascend: str = ""
    sglang: str = ""
    megatron: str = ""
    megatron_core: str = ""
    megatron_wheel: bool = False
    mindspeed: str = ""
    mindspeed_says: str = ""
    megatron_adaptor: str = ""
    transformer_engine_npu: str = ""
    mindspeed_ops: str = ""
    mindspeed_bridge: str = ""
    megatron_bridge: str = ""
    mbridge: str = ""
    transformers: str = ""

    @property
    def name(self) -> str:
        """The first tag: the name of a test case."""
        return self.tags[0]


_CANN_9_1 = {
    "cann": "9.1.0",
    "torch_npu": "2.10.0.post4",
    "vllm": "0.23.0",
    "vllm_ascend": "0.23.0",
    "transformers": "5.10.4",
}
_NEWEST_PAIR = {
    "megatron": "core_v0.18.0",
    "megatron_core": "0.18.0",
    "mindspeed": "core_r0.18.0",
    "mindspeed_says": "0.12.1",
    "megatron_adaptor": "core_r0.18.0",
    "transformer_engine_npu": "main",
    "mindspeed_ops": "master",
    "mindspeed_bridge": "master",
    "megatron_bridge": "0.5.0",
}
_A5_PAIR = {
    "megatron": "core_v0.12.1",
    "megatron_core": "0.12.1",
    "mindspeed": "0c6c0ce",
    "mindspeed_says": "0.12.1",
}
_PAIR_OF_0_16 = {
    "megatron": "core_r0.16.0",
    "megatron_core": "0.16.2",
    "mindspeed": "core_r0.16.0",
    "mindspeed_says": "0.16.0",
    "mbridge": "any",
}

VERL_IMAGES = (
    Image(
        tags=(
            "v0.9.1-cann9.1.0-torch_npu2.10.0.post4-910b-ubuntu22.04-py3.12-vllm",
            "v0.9.1-cann9.1.0-torch_npu2.10.0.post4-a3-ubuntu22.04-py3.12-vllm",
        ),
        source="docker/ascend/Dockerfile.ascend_9.1.0_a2_v0.9.1",
        verl="0.9.1",
        **_CANN_9_1,
        **_NEWEST_PAIR,
    ),
    Image(
        tags=("latest-vllm-910b-ubuntu", "latest-vllm-a3-ubuntu"),
        source="docker/ascend/Dockerfile.ascend_9.1.0_a2",
        verl="main",
        **_CANN_9_1,
        **_NEWEST_PAIR,
    ),
    Image(
        tags=("v0.9.1-cann9.1.0-torch_npu2.10.0.post4-950-ubuntu22.04-py3.12-vllm",),
        source="docker/ascend/Dockerfile.ascend_9.1.0_a5_v0.9.1",
        verl="0.9.1",
        **_CANN_9_1,
        **_A5_PAIR,
    ),
    Image(
        tags=("latest-vllm-950-ubuntu",),
        source="docker/ascend/Dockerfile.ascend_9.0.1_a5",
        verl="main",
        **_CANN_9_1,
        **_A5_PAIR,
    ),
    Image(
        tags=("latest-sglang-910b-ubuntu", "latest-sglang-a3-ubuntu"),
        source="docker/ascend/Dockerfile.ascend.sglang_8.5.0_a2",
        cann="8.5.0",
        torch_npu="2.8.0.post2",
        verl="main",
        sglang="0.5.10",
        megatron_wheel=True,
        **_PAIR_OF_0_16,
    ),
    Image(
        tags=(
            "v0.8.0-cann9.0.0-torch_npu2.9.0.post2-910b-ubuntu22.04-py3.11-vllm",
            "v0.8.0-cann9.0.0-torch_npu2.9.0.post2-a3-ubuntu22.04-py3.11-vllm",
        ),
        source="docker/ascend/Dockerfile.ascend_9.0.0_a2_v0.8.0",
        cann="9.0.0",
        torch_npu="2.9.0.post2",
        verl="0.8.0",
        vllm="0.18.0",
        vllm_ascend="0.18.0",
        megatron_bridge="de93536e",
        transformers="main",
        **_PAIR_OF_0_16,
    ),
    Image(
        tags=("verl-8.5.0-910b-ubuntu22.04-py3.11-v0.7.1", "verl-8.5.0-a3-ubuntu22.04-py3.11-v0.7.1"),
        source="docker/ascend/Dockerfile.ascend_8.5.0_a2_v0.7.1",
        cann="8.5.0",
        torch_npu="2.8.0",
        verl="0.7.1",
        vllm="0.13.0",
        vllm_ascend="0.13.0",
        megatron="core_v0.12.1",
        megatron_core="0.12.1",
        mindspeed="2.3.0_core_r0.12.1",
        mindspeed_says="0.12.1",
        mbridge="0.15.1",
        transformers="4.57.6",
    ),
    Image(
        tags=("verl-8.3.rc1-910b-ubuntu22.04-py3.11-v0.7.0", "verl-8.3.rc1-a3-ubuntu22.04-py3.11-v0.7.0"),
        source="docker/ascend/Dockerfile.ascend_8.3.rc1_a2",
        cann="8.3.RC1",
        torch_npu="2.7.1",
        verl="0.7.0",
        vllm="0.11.0",
        vllm_ascend="0.11.0",
        megatron="core_v0.12.1",
        megatron_core="0.12.1",
        mindspeed="f2b0977e",
        mindspeed_says="0.12.1",
        mbridge="any",
        transformers="4.57.6",
    ),
)
"""verl's images that are built, and the last that have each of its older releases."""

OTHER_IMAGES = (
    Image(
        tags=("MindSpeed-Bridge",),
        source="docker/OVERVIEW.zh.md",
        cann="9.1.0",
        torch_npu="2.9.0.post6",
        megatron="core_v0.18.0",
        megatron_core="0.18.0",
        megatron_adaptor="core_r0.18.0",
        transformer_engine_npu="main",
        mindspeed_ops="master",
        mindspeed_bridge="master",
        megatron_bridge="0.5.0",
    ),
    Image(
        tags=("slime-ascend 0.3.0",),
        source="docker/npu_docker/v0.3.0",
        cann="9.1.0",
        torch_npu="2.10.0",
        sglang="0.5.13",
        megatron="1dcf0dafa",
        megatron_core="0.16.0rc0",
        megatron_adaptor="f707a3b6",
        transformer_engine_npu="47d60449",
        megatron_bridge="dev_rl",
        mbridge="89eb1088",
    ),
    Image(
        tags=("ROLL npu_fp8",),
        source="docker of the branch npu_fp8",
        cann="9.0.1",
        torch_npu="2.10.0.post2",
        vllm="0.23.0",
        vllm_ascend="0.23.0rc1",
        megatron="core_r0.17.0",
        megatron_core="0.17.2",
        megatron_adaptor="core_r0.17.0",
        transformer_engine_npu="48378a9c",
    ),
    Image(
        tags=("ms-swift",),
        source="modelscope/ms-swift, pull request 10087 (open)",
        torch_npu="any",
        megatron="core_v0.18.0",
        megatron_core="0.18.0",
        megatron_adaptor="core_r0.18.0",
        transformer_engine_npu="main",
    ),
    Image(
        tags=("vime",),
        source="docker/npu_patch/README.md",
        torch_npu="any",
        megatron="1dcf0dafa",
        megatron_core="0.16.0rc0",
        mindspeed="fc63de5c",
        mindspeed_says="0.14.1",
        megatron_adaptor="15582add",
        transformer_engine_npu="d743c83d",
        megatron_bridge="3fd37680",
        mbridge="89eb1088",
        vllm="0.28.0",
        vllm_ascend="0.28.0",
    ),
)
"""Images and install scripts of other projects; but for vime's they have MegatronAdaptor and no MindSpeed."""

IMAGES = VERL_IMAGES + OTHER_IMAGES


def image(tag: str) -> Image:
    """Return the image with this tag."""
    return next(image for image in IMAGES if tag in image.tags)


# A simulated image

_MAIN_OF_VERL = "0.10.0.dev"
_TE_NPU = "2.13.0"
_BRANCHES_SAY = {"megatron_adaptor": "0.1.0", "mindspeed_ops": "0.1.0", "mindspeed_bridge": "0.3.1"}
"""What the distributions say that are installed of a branch or a commit."""


def make(image: Image, folder: Path, megatron: Path | None = None) -> Path:
    """Make a folder for PYTHONPATH that simulates an image; return it.

    Args:
        megatron: the folder of a release of Megatron-core (.work/megatron/0.18.2), which is linked, and then
            says its own release. torch_npu, MindSpeed, MegatronAdaptor and TransformerEngineNPU are the
            tests' stand-ins then, so that the image can train on a CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch_npu = _release(image.torch_npu, "2.10.0")
    _package(folder, "torch_npu", torch_npu, {"version.py": f"__version__ = {torch_npu!r}\n"})
    _transformers(folder, _release(image.transformers, "5.11.0.dev0"))
    _package(folder, "vllm", image.vllm, {"_version.py": f"__version__ = {image.vllm!r}\n"})
    about = {"_version.py": f"__version__ = {image.vllm_ascend!r}\n"}
    _package(folder, "vllm_ascend", image.vllm_ascend, about)
    _package(folder, "sglang", image.sglang, {"_version.py": f"__version__ = {image.sglang!r}\n"})
    _package(folder, "mbridge", _release(image.mbridge, "0.15.1"))
    _megatron(image, folder)
    _mindspeed(image, folder)
    for name, says in _BRANCHES_SAY.items():
        _package(folder, name, says if getattr(image, name) else "")
    if image.transformer_engine_npu:
        about = {"__init__.py": _TE_NPU_SOURCE, "common/__init__.py": "", "pytorch/__init__.py": ""}
        _package(folder, "transformer_engine", _TE_NPU, about)
    if image.verl:
        _verl(image, folder)
    if megatron is not None:
        _stand_ins(folder, megatron)
    return folder


def _stand_ins(folder: Path, megatron: Path) -> None:
    """Put a real Megatron-core in the place of the simulated one, and what can run beside it."""
    shutil.rmtree(folder / "megatron" / "core")
    (folder / "megatron" / "core").symlink_to(megatron / "megatron" / "core")
    sources = {
        "torch_npu": _TESTS / "stubs" / "torch_npu",
        "megatron/training": _TESTS / "on_mindspeed" / "stand_in" / "megatron" / "training",
        "mindspeed": _TESTS / "on_mindspeed" / "stand_in" / "mindspeed",
        "megatron_adaptor": _TESTS / "stubs" / "megatron_adaptor_stand_in" / "megatron_adaptor",
        "transformer_engine": _TESTS / "stubs" / "transformer_engine_npu" / "transformer_engine",
    }
    adaptor = _TESTS / "stubs" / "megatron_adaptor_stand_in"
    shutil.copytree(adaptor / "ascend_contract", folder / "ascend_contract")
    for name, source in sources.items():
        if (folder / name).is_dir():
            kept = (folder / name / "__init__.py").read_text(encoding="utf-8") if name == "mindspeed" else ""
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
            if kept:
                (folder / name / "__init__.py").write_text(kept, encoding="utf-8")


_TESTS = Path(__file__).parent
_TE_NPU_SOURCE = f'''"""Transformer Engine NPU: Transformer Engine's interface on Ascend NPUs."""

__version__ = "{_TE_NPU}"
'''


def _release(version: str, other: str) -> str:
    """Return a version: what the table says where it is one, `other` for a branch, a commit or «any»."""
    return version if "." in version or not version else other


def _transformers(folder: Path, version: str) -> None:
    router = "Qwen3MoeTopKRouter" if version >= "5" else "Qwen3MoeSparseMoeBlock"
    files = {
        "__init__.py": f"__version__ = {version!r}\n",
        "models/qwen3_moe/modeling_qwen3_moe.py": f"class {router}: ...\n",
    }
    _package(folder, "transformers", version, files)


def _megatron(image: Image, folder: Path) -> None:
    """Write what is read of Megatron-LM's source tree; no __init__.py, since it is a namespace package."""
    files = {
        "core/__init__.py": "",
        "core/package_info.py": _package_info(image.megatron_core),
        "core/transformer/transformer_config.py": "class TransformerConfig:\n    moe_router_topk: int = 2\n",
    }
    if not image.megatron_wheel:
        files["training/__init__.py"] = ""
    if image.megatron_bridge:
        files["bridge/__init__.py"] = ""
        files["bridge/package_info.py"] = _package_info(_release(image.megatron_bridge, "0.5.0"))
    _write(folder / "megatron", files)
    _metadata(folder, "megatron-core", image.megatron_core)
    if "." in image.megatron_bridge:  # a commit is on PYTHONPATH, and not installed
        _metadata(folder, "megatron-bridge", image.megatron_bridge)


def _package_info(version: str) -> str:
    """Return what Megatron-core and Megatron-Bridge write of their version."""
    release = version.partition("rc")[0]
    numbers = zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True)
    about = "".join(f"{name} = {number}\n" for name, number in numbers)
    return f"{about}PRE_RELEASE = {version.removeprefix(release)!r}\n"


def _mindspeed(image: Image, folder: Path) -> None:
    if not image.mindspeed:
        return
    # From core_r0.17.0 on its package imports MegatronAdaptor.
    imports = "import megatron_adaptor\n" if image.mindspeed in ("core_r0.17.0", "core_r0.18.0") else ""
    source = f'"""Mindspeed is a distributed training platform."""\n{imports}'
    files = {"__init__.py": source, "megatron_adaptor.py": "", "args_utils.py": ""}
    _package(folder, "mindspeed", image.mindspeed_says, files)


def _verl(image: Image, folder: Path) -> None:
    """Write what is read of verl without an import."""
    says = _MAIN_OF_VERL if image.verl == "main" else image.verl
    old = says.startswith(("0.7.", "0.8."))
    asks = "" if old else '_entry_points(group="verl.plugins")\n'
    # The legacy mbridge: the default up to 0.8, gone in main. 0.7.0's engine workers don't replay.
    bridge = "" if image.verl == "main" else f"vanilla_mbridge: {old}\n"
    replay = "" if says == "0.7.0" else "router_replay:\n  mode: disabled\n"
    files = {
        "__init__.py": asks,
        "version/version": f"{says}\n",
        "trainer/config/engine/megatron.yaml": f"use_mbridge: True\n{bridge}{replay}",
    }
    if says.startswith("0.7."):
        files["workers/megatron_workers.py"] = ""
    _write(folder / "verl", files)
    _metadata(folder, "verl", says)


def _package(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> None:
    """Write a package and its distribution; nothing for an empty version."""
    if not version:
        return
    _write(folder / name, {"__init__.py": "", **(files or {})})
    _metadata(folder, name, version)


def _metadata(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    _write(info, {"METADATA": text, "top_level.txt": f"{name.replace('-', '_')}\n"})


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def with_npu_replay(image: Image, folder: Path, *, installed: bool = True) -> Path:
    """Return a folder that simulates an image, with npu_replay's metadata; a clone on PYTHONPATH has none."""
    if installed:
        about = folder / "npu_replay-0.1.0.dist-info" / "entry_points.txt"
        _metadata(folder, "npu-replay", "0.1.0")
        about.write_text("[verl.plugins]\nnpu_replay = npu_replay_autoload.verl\n", encoding="utf-8")
    else:
        _write(folder, {"npu_replay/__init__.py": ""})
    return make(image, folder)


def run_replay_lines(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run examples/verl/replay_lines.py with these arguments, in an environment of these variables alone."""
    script = _TESTS.parent / "examples" / "verl" / "replay_lines.py"
    command = [sys.executable, "-S", str(script), *words]
    variables = {"PYTHONPATH": str(folder), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
