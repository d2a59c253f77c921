"""examples/verl: each script is a whole job, which verl composes and checks, and in which replay is on."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from npu_replay.compat import probe
from npu_replay.compat.verl import config as verl_config
from on_verl.test_pages import LINES, typed
from verl_configs import HAS_LEGACY, overridden

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
VLLM = "0.23.0" if metadata.version("verl") >= "0.9" else "0.18.0"
"""The vLLM of the image with this release."""


def python_that_shows(folder: Path) -> dict[str, str]:
    """A script's environment: `python3 -m` prints what it is called with, and that vLLM is installed."""
    for name in ("vllm", "vllm_ascend"):
        info = folder / f"{name}-{VLLM}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {VLLM}\n")
    python = folder / "python3"
    shows = 'if [[ $1 == -m ]]; then printf "%s\\n" "${@:2}"; else exec "$REAL_PYTHON" "$@"; fi'
    python.write_text(f"#!/bin/bash\n{shows}\n")
    python.chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        "REAL_PYTHON": sys.executable,
        "MODEL": "/shared/Qwen3-30B-A3B",
        "DATA": "/shared/gsm8k",
    }


def ran(*command: Any, **how: Any) -> Any:
    return subprocess.run(command, capture_output=True, text=True, **how)


def checked(name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """The job's config, after verl's checks and npu_replay's on a machine with this vLLM."""
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
    verl_config.check_actor(config.actor_rollout_ref, legacy=legacy)
    return config


def mode_of(config: DictConfig) -> str:
    legacy = HAS_LEGACY and config.trainer.use_legacy_worker_impl != "disable"
    return verl_config.mode_of(config.actor_rollout_ref, legacy=legacy)


def test_there_is_one_for_each_trainer_and_device() -> None:
    wanted = {f"{on}_{by}" for on in ("npu", "cuda") for by in ("megatron", "fsdp2")}
    assert {script.stem for script in SCRIPTS} == wanted


@pytest.mark.parametrize("mode", ["R2", "R3"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_a_whole_job_with_replay(
    script: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ran("bash", script, env=python_that_shows(tmp_path) | {"MODE": mode})
    assert done.returncode == 0, done.stderr
    trainer, path, name, *lines = done.stdout.splitlines()
    assert (trainer, path) == ("verl.trainer.main_ppo", "--config-path=config")
    name = name.removeprefix("--config-name=").removesuffix(".yaml")
    config = checked(name, lines, monkeypatch)
    assert mode_of(config) == mode
    device = script.stem.partition("_")[0]
    assert config.trainer.device == ("npu" if device == "npu" else "cuda")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    environment = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    wanted = {"NPU_REPLAY_VLLM_ASCEND"} if (device, mode) == ("npu", "R3") else set()
    if mode == "R3" and metadata.version("verl") < "0.9":
        wanted.add("VERL_USE_EXTERNAL_MODULES")
    assert {*environment} == wanted
    synchronous = OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.no_async_scheduling")
    assert bool(synchronous) == (mode == "R3" and VLLM == "0.18.0")


def test_what_the_caller_adds_counts_last(tmp_path: Path) -> None:
    environment = python_that_shows(tmp_path)
    done = ran("bash", SCRIPTS[0].name, "trainer.nnodes=1", cwd=FOLDER, env=environment)
    assert done.stdout.splitlines()[-1] == "trainer.nnodes=1"
    for variable, value in (("MODE", "R4"), ("MODEL", ""), ("DATA", "")):
        done = ran("bash", SCRIPTS[0], env=environment | {variable: value})
        assert done.returncode, "and verl isn't called"
        assert not done.stdout


def test_the_lines_are_those_of_the_pages(tmp_path: Path) -> None:
    """For each mode, trainer and device there is a block of docs/verl-*.md with just these lines."""
    environment = python_that_shows(tmp_path)
    pages = [{*typed(block)} for _, block in LINES]
    for asked in [("R2", "megatron"), ("R3", "megatron"), ("R2", "fsdp2"), ("R3", "fsdp2")]:
        done = ran(sys.executable, FOLDER / "replay_lines.py", *asked, "npu", env=environment, check=True)
        lines = {*done.stdout.splitlines()} - {"trainer.use_legacy_worker_impl=disable"}
        if asked == ("R3", "fsdp2") and VLLM != "0.18.0":
            continue  # the page says what to leave out of the block for 0.18
        assert lines in pages


def test_a_clone_on_the_path_is_imported_by_the_workers_of_agent_loops_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no entry points, by which 0.9 finds an installed one."""
    monkeypatch.syspath_prepend(FOLDER)
    given = importlib.import_module("replay_lines")
    monkeypatch.setattr(given.metadata, "entry_points", lambda group: ())
    module = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=npu_replay"
    assert module in given.lines("R3", "megatron", "npu")
    assert module not in given.lines("R2", "megatron", "npu"), "external_lib does"


def test_lines_that_verl_would_refuse_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    given = importlib.import_module("replay_lines")
    monkeypatch.setattr(given, "release", lambda package: (0, 13))
    with pytest.raises(SystemExit, match=r"no routes before 0\.18. Take R2"):
        given.lines("R3", "megatron", "npu")
    assert given.lines("R2", "megatron", "npu")
    monkeypatch.setattr(given, "release", lambda package: (0, 18))
    if VLLM == "0.18.0":  # what this verl goes with
        assert given.lines("R3", "megatron", "npu")
    else:
        with pytest.raises(SystemExit, match=r"verl 0\.9 refuses R3 with vLLM below 0\.22"):
            given.lines("R3", "megatron", "npu")
