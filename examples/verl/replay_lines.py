"""Prints what replay adds to a verl job on this machine, an override a line: it asks which releases are here.

    python3 replay_lines.py MODE TRAINER DEVICE    # R2 or R3, megatron or fsdp2, npu or cuda

The scripts beside it call this. With a script of your own, verl's examples among them:

    bash run_qwen3_30b_a3b_megatron.sh $(python3 replay_lines.py R3 megatron npu)

What docs/verl-ascend.md and docs/verl-cuda.md give for an image is what this prints there. Nothing of verl or
of a rollout engine is imported.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata, util
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENV = "+ray_kwargs.ray_init.runtime_env.env_vars"
NO_LEGACY = "trainer.use_legacy_worker_impl"


def folder(package: str) -> Path:
    """Where a package lies; it isn't imported."""
    found = util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"replay_lines.py: no {package} here. Run it where the job runs, in the image's Python.")
    return Path(next(iter(found.submodule_search_locations)))


def release(package: str) -> tuple[int, ...]:
    """Major and minor; (0, 0) where it isn't installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(package))[:2]))
    except metadata.PackageNotFoundError:
        return (0, 0)


def lines(mode: str, trainer: str, device: str) -> list[str]:
    """The overrides, those of verl's own keys first."""
    verl = folder("verl")
    has_legacy = (verl / "workers" / "megatron_workers.py").is_file()  # 0.7: they read other keys
    given = ["actor_rollout_ref.model.external_lib=npu_replay"]
    if trainer == "fsdp2":
        given += [f"+{ACTOR}.fsdp_config.router_replay.mode={mode}"]
        given += [f"{NO_LEGACY}=disable"] * has_legacy  # its legacy FSDP workers drop routes
    elif has_legacy:
        given += [f"{ACTOR}.megatron.use_remove_padding=True", f"{ACTOR}.router_replay.mode={mode}"]
    else:
        given += ["actor_rollout_ref.model.use_remove_padding=True"]
        given += [f"{ACTOR}.megatron.router_replay.mode={mode}"]
    if mode == "R2":
        return given
    if device == "npu" and (0, 0) < release("vllm") < (0, 18):
        sys.exit("replay_lines.py: vllm-ascend captures no routes before 0.18. Take R2.")
    given.append(f"{ROLLOUT}.enable_rollout_routing_replay=True")
    if release("vllm") < (0, 22):  # older ones hand out another step's rows under asynchronous scheduling
        given.append(f"+{ROLLOUT}.engine_kwargs.vllm.no_async_scheduling=True")
    if device == "npu":
        given.append(f"{ENV}.NPU_REPLAY_VLLM_ASCEND='1'")
    # The workers of agent loops: 0.9 finds an installed npu_replay by its entry points, which a clone hasn't.
    asks = "verl.plugins" in (verl / "__init__.py").read_text(encoding="utf-8")
    if asks and (0, 0) < release("vllm") < (0, 22):
        sys.exit("replay_lines.py: verl 0.9 refuses R3 with vLLM below 0.22. Take R2, or verl 0.8.0.")
    installed = "npu_replay" in {one.name for one in metadata.entry_points(group="verl.plugins")}
    if not (asks and installed):
        given.append(f"{ENV}.VERL_USE_EXTERNAL_MODULES=npu_replay")
    return given


if __name__ == "__main__":
    known = (("R2", "R3"), ("megatron", "fsdp2"), ("npu", "cuda"))
    if len(sys.argv) != 4 or any(word not in words for word, words in zip(sys.argv[1:], known, strict=True)):
        sys.exit("usage: python3 replay_lines.py R2|R3 megatron|fsdp2 npu|cuda")
    print(*lines(*sys.argv[1:]), sep="\n")
