"""Print what replay adds to a verl job on this machine: it asks what is installed.

    python3 replay_lines.py MODE TRAINER DEVICE    # R2 or R3, megatron or fsdp2, npu or cuda

It prints lines to paste behind the command of a job. With --words it prints the arguments themselves, one a
line, without what is for a shell: for the scripts beside it, and for a script of your own:

    bash run_qwen3_30b_a3b_megatron.sh $(python3 replay_lines.py --words R3 megatron npu)

在作业的镜像中运行：打印重放需要追加到启动命令末尾的配置项；加 --words 则每行一个参数，供脚本使用，
此时缺少作业启动所必需的软件也会使本脚本报错退出。

They go behind the job's last setting, before "$@", | or >. With --words, what the job can't start without
ends this script, too.

stderr says in which image it seems to run, and what is installed. What is missing is said in Chinese, too.
The blocks of docs/verl-ascend.md are what it prints in their images. Nothing of verl or of a rollout engine
is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import NoReturn

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENV = "+ray_kwargs.ray_init.runtime_env.env_vars"
MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
AUTOLOAD = "NPU_REPLAY_AUTOLOAD"
NO_LEGACY = "trainer.use_legacy_worker_impl"
PRODUCTS = {
    "verl": "verl",
    "torch_npu": "torch_npu",
    "vLLM": "vllm",
    "vllm-ascend": "vllm_ascend",
    "SGLang": "sglang",
    "Megatron-core": "megatron.core",
    "MindSpeed": "mindspeed",
    "MegatronAdaptor": "megatron_adaptor",
    "Megatron-Bridge": "megatron.bridge",
    "mbridge": "mbridge",
}
"""Maps each product's name to its package."""


def is_here(package: str) -> bool:
    """Whether a package can be imported; only namespaces above it are."""
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def folder_of_verl() -> Path:
    spec = util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "replay_lines.py: verl isn't installed here. Run this where the job runs, in the image's Python. "
            "这里没有安装 verl。请在作业的容器中运行。"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def version(package: str) -> str:
    """What its distribution says; empty where none is installed."""
    try:
        return metadata.version(package.replace(".", "-"))
    except metadata.PackageNotFoundError:
        return ""


def release(package: str) -> tuple[int, ...]:
    """The three numbers of a version; () where it isn't installed."""
    return tuple(map(int, re.findall(r"\d+", version(package))[:3]))


def engine() -> str:
    return "sglang" if release("sglang") and not release("vllm") else "vllm"


def lines(mode: str, trainer: str, device: str, lacks: Callable[[str], None]) -> list[str]:
    """The overrides, those of verl's own keys first; `lacks` says what the job can't start without."""
    verl = folder_of_verl()
    if device == "npu" and not is_here("torch_npu"):
        lacks(
            "torch_npu isn't installed here: this is no image for NPUs. Run this in the job's container. "
            "这里没有安装 torch_npu。请在作业的容器中运行。"
        )
    chosen = ["actor_rollout_ref.model.external_lib=npu_replay", *mode_lines(mode, trainer, verl)]
    if trainer == "megatron":
        chosen += bridge_lines(verl, lacks)
    if trainer == "fsdp2" and version("transformers").startswith("4."):
        warn(
            "transformers 4 may hang under FSDP2, with replay off too, unless verl replaces the model's MoE "
            "block, as it does for Qwen3-MoE on an NPU. FSDP2 下 transformers 4 可能卡死；"
            "verl 在 NPU 上替换了 MoE 模块的模型（如 Qwen3-MoE）除外。"
        )
    if mode == "R3":
        chosen += [f"{ROLLOUT}.enable_rollout_routing_replay=True", *engine_lines(device, verl)]
        chosen += module_lines(verl)
    return chosen


def mode_lines(mode: str, trainer: str, verl: Path) -> list[str]:
    has_legacy = (verl / "workers" / "megatron_workers.py").is_file()  # 0.7: they read other keys
    if trainer == "fsdp2":
        if "router_replay:" not in megatron_settings(verl):
            end("verl 0.7.0 replays on Megatron alone. verl 0.7.0 只能在 Megatron 上重放。请改用 megatron。")
        key = f"+{ACTOR}.fsdp_config.router_replay.mode={mode}"
        return [key, *[f"{NO_LEGACY}=disable"] * has_legacy]  # its legacy FSDP workers drop routes
    if has_legacy:
        return [f"{ACTOR}.megatron.use_remove_padding=True", f"{ACTOR}.router_replay.mode={mode}"]
    return ["actor_rollout_ref.model.use_remove_padding=True", f"{ACTOR}.megatron.router_replay.mode={mode}"]


def megatron_settings(verl: Path) -> str:
    """verl's own yaml of the Megatron engine: which keys there are."""
    return (verl / "trainer" / "config" / "engine" / "megatron.yaml").read_text(encoding="utf-8")


def bridge_lines(verl: Path, lacks: Callable[[str], None]) -> list[str]:
    """The bridge that is installed, where verl would take the other; releases after 0.9 know only one."""
    default = re.search(r"(?m)^vanilla_mbridge: *(\w+)", megatron_settings(verl))
    takes_mbridge = default is not None and default[1] == "True"
    has = {True: is_here("mbridge"), False: is_here("megatron.bridge")}
    if has[takes_mbridge]:
        return []
    if default is not None and has[not takes_mbridge]:
        return [f"{ACTOR}.megatron.vanilla_mbridge={not takes_mbridge}"]
    wanted = "Megatron-Bridge" if default is None else "Megatron-Bridge or mbridge"
    lacks(
        f"this verl loads the weights of a Megatron model with {wanted}, which isn't installed here. "
        "缺少加载 Megatron 权重所需的 bridge。请改用 fsdp2 或更换镜像。"
    )
    return []


def engine_lines(device: str, verl: Path) -> list[str]:
    if engine() == "sglang":
        # With token ids alone verl takes the routes for a tensor, and from 0.5.10 on SGLang sends text.
        return [f"{ROLLOUT}.skip_tokenizer_init=False"] * (release("sglang") >= (0, 5, 10))
    if not release("vllm"):
        end(
            "neither vLLM nor SGLang is installed here, and R3 needs what its release needs. Run this in the "
            "job's container. 这里没有安装推理引擎，R3 的配置取决于它的版本。请在作业的容器中运行。"
        )
    if device == "npu" and release("vllm_ascend") >= (0, 31):
        end(
            "npu_replay captures on vllm-ascend 0.18 to 0.30. npu_replay 只支持在 vllm-ascend 0.18 至 0.30 "
            "上采集。请改用 R2 或更换镜像。"
        )
    if device == "npu" and release("vllm") < (0, 18):
        end("vllm-ascend captures no routes before 0.18. Take R2. 该版本不采集路由。请改用 R2 或更换镜像。")
    if asks_plugins(verl) and release("vllm") < (0, 22):
        end(
            "verl 0.9 refuses R3 with vLLM below 0.22. Take R2, or verl 0.8.0. "
            "vLLM 版本过低。请改用 R2 或 verl 0.8.0。"
        )
    chosen = []
    if release("vllm") < (0, 22):  # older ones hand out another step's rows under asynchronous scheduling
        chosen.append(f"+{ROLLOUT}.engine_kwargs.vllm.no_async_scheduling=True")
    if device == "npu":
        chosen.append(f"{ENV}.NPU_REPLAY_VLLM_ASCEND=on")  # a word: Ray refuses the number that 1 would be
        chosen += [f"{ENV}.{AUTOLOAD}=on"] * autoload_is_off()  # else vLLM's entry point does nothing
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "npu_replay" not in allowed.split(","):  # vLLM loads those that it names
            chosen.append(f"{ENV}.VLLM_PLUGINS={listed([allowed, 'npu_replay'])}")
    return chosen


def autoload_is_off() -> bool:
    """Whether the environment keeps entry points from loading npu_replay, as a shared image may."""
    return os.environ.get(AUTOLOAD, "").strip().lower() in ("0", "false", "no", "off")


def asks_plugins(verl: Path) -> bool:
    """Whether verl finds an installed npu_replay by its entry points: from 0.9 on."""
    return "verl.plugins" in (verl / "__init__.py").read_text(encoding="utf-8")


def module_lines(verl: Path) -> list[str]:
    """Has the workers of agent loops import npu_replay, beside what the environment has them import."""
    allowed = os.environ.get(PLUGINS, "auto").strip().lower()
    is_allowed = allowed == "auto" or "npu_replay" in map(str.strip, allowed.split(","))
    is_allowed &= not autoload_is_off()
    plugins = {plugin.name for plugin in metadata.entry_points(group="verl.plugins")}  # a clone has none
    if asks_plugins(verl) and is_allowed and "npu_replay" in plugins:
        return []
    return [f"{ENV}.{MODULES}={listed([os.environ.get(MODULES, ''), 'npu_replay'])}"]


def listed(lists: list[str]) -> str:
    """Join lists with commas between the names, each name once."""
    value = ",".join(dict.fromkeys(filter(None, ",".join(lists).split(","))))
    return f"'{value}'" if "," in value else value  # Hydra splits at a bare comma


def tag() -> str:
    """The tag of verl's image for Ascend with these releases, as verl names them."""
    verl_version = version("verl")
    number = verl_version.partition(".dev")[0]
    if release("verl") < (0, 8):
        return f"verl-*-v{number}"
    named = f"v{number}-*-torch_npu{version('torch_npu')}-*-{engine()}"
    return named if verl_version == number else f"latest-{engine()}-* or {named}"


def image(device: str) -> str:
    """Which image this seems to be, and what it has."""
    here = [name for name, package in PRODUCTS.items() if is_here(package)]
    # MindSpeed says 0.12.1 on all newer branches, too.
    releases = [f"{name} {version(PRODUCTS[name])}".strip() if name != "MindSpeed" else name for name in here]
    missing = [name for name in ("Megatron-Bridge", "mbridge") if name not in here]
    seems = f"this looks like verl's image {tag()}: " if device == "npu" and is_here("torch_npu") else ""
    return seems + ", ".join(releases) + "".join(f", no {name}" for name in missing)


def warn(text: str) -> None:
    print(f"replay_lines.py: {text}", file=sys.stderr)


def end(text: str) -> NoReturn:
    sys.exit(f"replay_lines.py: {text}")


def for_a_shell(overrides: list[str]) -> str:
    """The lines as they are pasted: a backslash ends each but the last, and the shell leaves inner quotes."""
    return " \\\n".join(f'"{line}"' if "'" in line else line for line in overrides)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="replay_lines.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "mode", choices=("R2", "R3"), help="whose routes: the trainer's, the engine's; 训练侧、推理引擎的路由"
    )
    parser.add_argument("trainer", choices=("megatron", "fsdp2"), help="actor.strategy; 训练后端")
    parser.add_argument("device", choices=("npu", "cuda"), help="of the job; 设备")
    parser.add_argument("--words", action="store_true", help="for a script, and not for a shell; 供脚本使用")
    asked = parser.parse_args()
    folder_of_verl()
    warn(image(asked.device))
    say = end if asked.words else warn
    if not version("npu_replay") and not is_here("npu_replay"):  # the latter by PYTHONPATH
        say(
            "npu_replay isn't installed here: these lines end the job with ModuleNotFoundError. Install its "
            "wheel on every node. 这里没有安装 npu_replay。请先在每个节点的容器中安装。"
        )
    overrides = lines(asked.mode, asked.trainer, asked.device, say)
    print("\n".join(overrides) if asked.words else for_a_shell(overrides))
