"""examples/verl: each script is a whole job, which verl composes and checks, and in which replay is on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import ascend_images
from npu_replay.compat import probe
from npu_replay.compat.verl import config as verl_config
from verl_configs import HAS_LEGACY, overridden

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
RELEASE = metadata.version("verl")
VLLM = "0.23.0" if RELEASE >= "0.9" else "0.18.0"
IMAGE = replace(
    next(image for image in ascend_images.VERL_IMAGES if image.verl == RELEASE),
    verl="",
    vllm=VLLM,
    vllm_ascend=VLLM,
)
"""The image with this verl, which is the real one here. That of 0.7.1 is given a vLLM that returns routes."""
OTHER_BRIDGE = {"mbridge": "0.15.1", "megatron_bridge": ""}
if RELEASE < "0.9":
    OTHER_BRIDGE = {"mbridge": "", "megatron_bridge": "0.5.0"}
"""The bridge alone that this verl doesn't take by itself."""
BETWEEN = [pytest.mark.long] * RELEASE.startswith("0.8")
"""0.8 is given the bridges of 0.7, and else the lines of 0.9."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
BRIDGE = "actor_rollout_ref.actor.megatron.vanilla_mbridge"


def python_that_shows(folder: Path, image: ascend_images.Image = IMAGE) -> dict[str, str]:
    """A script's environment, in a simulated image: `python3 -m` prints what it is called with."""
    ascend_images.make(image, folder)
    python = folder / "python3"
    shows = 'if [[ $1 == -m ]]; then printf "%s\\n" "${@:2}"; else exec "$REAL_PYTHON" "$@"; fi'
    python.write_text(f"#!/bin/bash\n{shows}\n")
    python.chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        "REAL_PYTHON": sys.executable,
        MODULES: "",
        "MODEL": "/shared/Qwen3-30B-A3B",
        "DATA": "/shared/gsm8k",
    }


def ran(*command: Any, **how: Any) -> Any:
    return subprocess.run(command, capture_output=True, text=True, **how)


def checked(
    name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[DictConfig, str, dict[str, str]]:
    """The job's config, mode and variables, after verl's checks and ours on a machine with this vLLM."""
    config = overridden(name, lines)
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    engine = "megatron" if "megatron" in name else "fsdp_config"
    for section in ("actor", "rollout", f"ref.{engine}"):  # refused: a key that its class lacks
        omega_conf_to_dataclass(OmegaConf.select(config.actor_rollout_ref, section))
    found = [product for product in probe.products() if product.name == "verl"]
    engines = ("vllm", "vllm-ascend") if config.trainer.device == "npu" else ("vllm",)
    found += [probe.Product(one, True, VLLM, "/there") for one in engines]
    monkeypatch.setattr(probe, "products", lambda: tuple(found))
    environment = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    assert all(isinstance(value, str) for value in environment.values()), "Ray takes no others"
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    legacy = HAS_LEGACY and config.trainer.use_legacy_worker_impl != "disable"
    OmegaConf.set_readonly(config, False)
    return config, verl_config.check_actor(config.actor_rollout_ref, legacy=legacy), environment


def test_there_is_one_for_each_trainer_and_device() -> None:
    wanted = {f"{on}_{by}" for on in ("npu", "cuda") for by in ("megatron", "fsdp2")}
    assert {script.stem for script in SCRIPTS} == wanted


@pytest.mark.parametrize("mode", [pytest.param("R2", marks=BETWEEN), "R3"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_a_whole_job_with_replay(
    script: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = IMAGE if mode == "R3" else replace(IMAGE, **OTHER_BRIDGE)
    done = ran("bash", script, env=python_that_shows(tmp_path, image) | {"MODE": mode})
    assert done.returncode == 0, done.stderr
    trainer, path, name, *lines = done.stdout.splitlines()
    assert (trainer, path) == ("verl.trainer.main_ppo", "--config-path=config")
    name = name.removeprefix("--config-name=").removesuffix(".yaml")
    config, acted_on, environment = checked(name, lines, monkeypatch)
    assert acted_on == mode
    device = script.stem.partition("_")[0]
    assert config.trainer.device == ("npu" if device == "npu" else "cuda")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    if script.stem == "npu_fsdp2":  # verl's engines read this key, and none beside it
        job = config.actor_rollout_ref
        assert [job[role].fsdp_config.use_torch_compile for role in ("actor", "ref")] == [False, False]
    wanted = {"NPU_REPLAY_VLLM_ASCEND"} if (device, mode) == ("npu", "R3") else set()
    if mode == "R3" and metadata.version("verl") < "0.9":
        wanted.add(MODULES)
    assert {*environment} == wanted
    told = {line.partition("=")[2] for line in lines if line.startswith(BRIDGE)}
    asked = mode == "R2" and "megatron" in script.stem
    assert told == ({str(RELEASE >= "0.9")} if asked else set()), "else the image has what its verl takes"
    synchronous = OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.no_async_scheduling")
    assert bool(synchronous) == (mode == "R3" and VLLM == "0.18.0")


@pytest.mark.newest  # the script's own words
def test_what_the_caller_adds_counts_last(tmp_path: Path) -> None:
    environment = python_that_shows(tmp_path)
    done = ran("bash", SCRIPTS[0].name, "trainer.nnodes=1", cwd=FOLDER, env=environment)
    assert done.stdout.splitlines()[-1] == "trainer.nnodes=1"
    for variable, value in (("MODE", "R4"), ("MODEL", ""), ("DATA", "")):
        done = ran("bash", SCRIPTS[0], env=environment | {variable: value})
        assert done.returncode, "and verl isn't called"
        assert not done.stdout


@pytest.mark.newest  # the script's own words
def test_megatron_on_one_node_takes_a_smaller_expert_parallelism(tmp_path: Path) -> None:
    environment = python_that_shows(tmp_path) | {"NODES": "1"}
    for script in SCRIPTS:
        if "megatron" in script.stem:
            refused = ran("bash", script, env=environment)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "8 devices are no multiple of pp * ep = 16" in refused.stderr
            lines = ran("bash", script, env=environment | {"EP": "4"}).stdout.splitlines()
            assert "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4" in lines


@pytest.mark.newest  # the script's own words
def test_a_script_says_that_it_wants_vllm(tmp_path: Path) -> None:
    sglang = next(image for image in ascend_images.VERL_IMAGES if image.sglang)
    environment = python_that_shows(tmp_path, replace(sglang, verl=""))
    for script in SCRIPTS:
        done = ran("bash", script, env=environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{script.name}: there is no vLLM here" in done.stderr
