"""The lines of config that a user copies, from docs/verl-*.md and from the scripts of examples/verl: verl
composes and checks them, and replay is on.

The pages in Chinese have the same lines (tests/docs).
"""

from __future__ import annotations

import os
import re
import shlex
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
from npu_replay.errors import ReplayError
from verl_configs import HAS_LEGACY, job, overridden

ROOT = Path(__file__).parents[2]


def engines_here(monkeypatch: pytest.MonkeyPatch, version: str, *engines: str) -> None:
    """What `probe` finds: verl, and these rollout engines."""
    products = [product for product in probe.products() if product.name == "verl"]
    products += [probe.Product(engine, True, version, "/there") for engine in engines]
    monkeypatch.setattr(probe, "products", lambda: tuple(products))


# The pages

DOCS = ROOT / "docs"
BLOCK = re.compile(r"```bash\n((?:\"?\+{0,2}(?:actor_rollout_ref|ray_kwargs)\.[^\n]+\n)+)```")
LINES = [
    (page.stem, block)
    for page in DOCS.glob("verl-*.md")
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
]
IMAGES = re.findall(
    r"vllm-ascend (0\.\d+)[^\n]*\n\n" + BLOCK.pattern, (DOCS / "verl-ascend.md").read_text(encoding="utf-8")
)
"""Of each block of R3: the vllm-ascend that the line above it names."""
REPLAY = "actor_rollout_ref.actor.megatron.router_replay"
YAML = [
    (page, block)
    for page in ("verl-cuda", "verl")
    for block in re.findall(
        r"```yaml\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL
    )
    if "router_replay:" in block
]


def test_the_pages_have_such_blocks() -> None:
    assert [page for page, _ in LINES].count("verl-cuda") == 5
    assert [page for page, _ in LINES].count("verl-ascend") == 7
    assert [ascend for ascend, _ in IMAGES] == ["0.23", "0.18"]


def typed(block: str) -> list[str]:
    """Its words, as a shell has them."""
    return shlex.split(block.replace("\\\n", ""))


def config_of(block: str) -> tuple[DictConfig, bool]:
    """The job's whole config with these lines, and whether its workers are 0.7's legacy ones."""
    lines = typed(block)
    fsdp = any("fsdp_config" in line for line in lines)
    legacy = any(line.startswith("actor_rollout_ref.actor.router_replay") for line in lines)
    if legacy and not HAS_LEGACY:
        pytest.skip("0.7 has these workers")
    if HAS_LEGACY and not legacy:
        lines.append("trainer.use_legacy_worker_impl=disable")
    if fsdp:
        lines.append("actor_rollout_ref.actor.strategy=fsdp2")
    trainer = "ppo_trainer" if fsdp else "ppo_megatron_trainer"
    config = overridden(trainer, ["actor_rollout_ref.rollout.name=vllm", *lines])
    OmegaConf.set_readonly(config, False)
    return config, legacy


@pytest.mark.parametrize("block", sorted({block for _, block in LINES}))
def test_lines_that_a_page_gives_switch_replay_on_and_lines_at_the_end_off(block: str) -> None:
    config, legacy = config_of(block)
    actor = config.actor_rollout_ref
    assert f"mode={verl_config.check_actor(actor, legacy=legacy)}" in block
    assert actor.model.external_lib == "npu_replay"
    text = (DOCS / "verl.md").read_text(encoding="utf-8").split("## Off at once\n")[1]
    section = text.split("\n## ")[0]
    key = next(line.lstrip("+").split("=")[0] for line in typed(block) if "router_replay.mode" in line)
    ends = BLOCK.findall(section)
    (end,) = [end for end in ends if any(line.lstrip("+").startswith(key + "=") for line in typed(end))]
    (scheduling,) = re.findall(r"`(\S+no_async_scheduling=False)`", section)
    actor = config_of(f"{block.rstrip()} \\\n{end.rstrip()} \\\n{scheduling}\n")[0].actor_rollout_ref
    assert verl_config.check_actor(actor, legacy=legacy) == "disabled"
    assert not actor.rollout.enable_rollout_routing_replay
    assert not actor.rollout.engine_kwargs.vllm.no_async_scheduling


def test_the_example_of_an_error_is_what_a_job_is_told() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8").split("In a verl job:\n")[1]
    shown = text.split("```text\n")[1].split("```")[0]
    with pytest.raises(ReplayError) as raised:
        verl_config.check_actor(config_of(f"{REPLAY}.mode=R3")[0].actor_rollout_ref, legacy=False)
    assert " ".join(shown.split()) == " ".join(str(raised.value).split())


@pytest.mark.parametrize(("ascend", "block"), IMAGES)
def test_lines_of_an_image_suit_its_vllm_ascend(
    ascend: str, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines_here(monkeypatch, f"{ascend}.0", "vllm", "vllm-ascend")
    config, legacy = config_of(block)
    verl_config.check_actor(config.actor_rollout_ref, legacy=legacy)
    without = block.replace("no_async_scheduling=True", "no_async_scheduling=False")
    if without != block:
        with pytest.raises(ReplayError, match="no_async_scheduling"):
            verl_config.check_actor(config_of(without)[0].actor_rollout_ref, legacy=legacy)


@pytest.mark.parametrize("page", [*DOCS.glob("verl*.md"), DOCS / "metrics.md"], ids=lambda page: page.stem)
def test_variables_that_a_page_puts_into_rays_environment_are_text(page: Path) -> None:
    """Ray refuses a number, and ends the job with a TypeError."""
    from ray._private.runtime_env.validation import parse_and_validate_env_vars

    text = page.read_text(encoding="utf-8")
    lines = sorted({*re.findall(r"[`\n]\"?(\+{1,2}ray_kwargs\.[^`\"\s\\]+)", text)})
    assert lines
    config = overridden("ppo_trainer", lines)
    environment = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)
    assert parse_and_validate_env_vars(environment) == environment


@pytest.mark.parametrize(("page", "block"), YAML)
def test_yaml_that_a_page_gives_switches_replay_on(page: str, block: str, tmp_path: Path) -> None:
    page_config = OmegaConf.create(block)
    replay = page_config.actor_rollout_ref.actor.megatron.router_replay
    lines = {f"{REPLAY}.{name}": value for name, value in replay.items()}
    lines |= {name: str(tmp_path) for name in lines if name.endswith("_file")}
    flag = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    if (asked := OmegaConf.select(page_config, flag)) is not None:
        lines[flag] = asked
    config = job(lines)
    if HAS_LEGACY:
        config.trainer.use_legacy_worker_impl = "disable"
    assert verl_config.check_actor(config.actor_rollout_ref, legacy=False) == replay.mode


# The scripts: each is a whole job

FOLDER = ROOT / "examples" / "verl"
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
    engines = ["vllm", "vllm-ascend"] if config.trainer.device == "npu" else ["vllm"]
    engines_here(monkeypatch, VLLM, *engines)
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
    if mode == "R3" and RELEASE < "0.9":
        wanted.add(MODULES)
    assert {*environment} == wanted
    bridges = {line.partition("=")[2] for line in lines if line.startswith(BRIDGE)}
    asked = mode == "R2" and "megatron" in script.stem
    assert bridges == ({str(RELEASE >= "0.9")} if asked else set()), "else the image has what its verl takes"
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
