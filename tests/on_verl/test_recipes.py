"""examples/verl: verl's Hydra composes what the scripts add to verl's own examples, and replay is on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from npu_replay.compat.verl import config as verl_config
from on_verl.test_pages import LINES, typed
from verl_configs import CONFIGS, FSDP, HAS_LEGACY, composed

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
SCRIPTS = sorted(FOLDER.glob("*_*.sh"))
FILES = sorted((FOLDER / "replay").glob("*.yaml"))
OURS = {FSDP, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"}
"""Keys that verl's own config lacks."""


def older(name: str) -> bool:
    return "verl_0.7" in name


def for_this_release(path: Path) -> bool:
    return older(path.name) == HAS_LEGACY


def trainer(name: str) -> str:
    return "ppo_trainer" if "fsdp" in name else "ppo_megatron_trainer"


def added(script: Path, tmp_path: Path) -> list[str]:
    """What verl's example is called with; a script in its place says it."""
    (line,) = [line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("run ")]
    example = tmp_path / "examples" / line.split()[1]
    example.parent.mkdir(parents=True)
    example.write_text('printf "%s\\n" "$@"\n')
    given = os.environ | {"VERL": str(tmp_path)}
    done = subprocess.run(
        ["bash", script.name, "trainer.nnodes=2"],
        cwd=FOLDER,
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, folder = done.stdout.splitlines()
    assert folder == f"--config-dir={FOLDER}"
    assert lines[-1] == "trainer.nnodes=2", "what the caller adds counts last"
    return lines


def with_lines(name: str, lines: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONFIGS), version_base=None):
        here = [f"hydra.searchpath=[file://{FOLDER}]", *lines]
        config = compose(config_name=trainer(name), overrides=here)
    OmegaConf.set_readonly(config, False)
    return config


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = f"{path}.{name}".lstrip(".")
        if isinstance(value, DictConfig):
            yield from leaves(value, key)
        else:
            yield key, value


def test_there_is_one_for_each_mode_trainer_and_device() -> None:
    wanted = {
        f"{on}_{by}_{mode}" for on in ("npu", "cuda") for by in ("megatron", "fsdp2") for mode in ("r2", "r3")
    }
    of_0_7 = {"npu_megatron_r2_verl_0.7", "npu_megatron_r3_verl_0.7"}
    assert {script.stem for script in SCRIPTS} == wanted | of_0_7


@pytest.mark.parametrize("script", [*filter(for_this_release, SCRIPTS)], ids=lambda script: script.stem)
def test_a_script_switches_replay_on(script: Path, tmp_path: Path) -> None:
    lines = ["actor_rollout_ref.rollout.name=vllm", *added(script, tmp_path)]
    if "fsdp2" in script.stem:
        lines.insert(0, "actor_rollout_ref.actor.strategy=fsdp2")  # verl's example has it
    config = with_lines(script.stem, lines)
    mode = "R3" if "_r3" in script.stem else "R2"
    actor = config.actor_rollout_ref
    verl_config.check_actor(actor, legacy=HAS_LEGACY)
    assert verl_config.mode_of(actor, legacy=HAS_LEGACY) == mode
    assert actor.model.external_lib == "npu_replay"
    assert actor.rollout.enable_rollout_routing_replay == (mode == "R3")
    assert config.trainer.nnodes == 2
    assert (config.trainer.device == "npu") == ("npu_fsdp2" in script.stem)  # verl's own NPU examples have it
    environment = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    assert ("NPU_REPLAY_VLLM_ASCEND" in environment) == (script.stem.startswith("npu") and mode == "R3")
    assert all(isinstance(value, str) for value in environment.values()), "Ray takes no others"


@pytest.mark.parametrize("file", [*filter(for_this_release, FILES)], ids=lambda file: file.stem)
def test_a_file_has_keys_of_verls_and_the_lines_of_the_pages(file: Path) -> None:
    given = dict(leaves(OmegaConf.load(file)))
    base = composed(trainer(file.stem))
    missing = object()
    unknown = {key for key in given if OmegaConf.select(base, key, default=missing) is missing}
    assert unknown <= OURS
    actor = {f"{key}={value}" for key, value in given.items() if key.startswith("actor_rollout_ref")}
    pages = [{line.lstrip("+") for line in typed(block)} for _, _, block in LINES]
    assert any(actor <= page for page in pages), "docs/verl-ascend.md or docs/verl-cuda.md"
