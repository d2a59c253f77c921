"""The lines of config in docs/verl-ascend.md and docs/verl-cuda.md: verl composes them, and replay is on.

The pages in Chinese have the same (tests/docs).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from npu_replay.compat import probe
from npu_replay.compat.verl import config as verl_config
from npu_replay.errors import ReplayError
from verl_configs import HAS_LEGACY, job, overridden

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```bash\n((?:\"?\+{0,2}(?:actor_rollout_ref|ray_kwargs)\.[^\n]+\n)+)```")
LINES = [
    (page.stem, found.group(1))
    for page in DOCS.glob("verl-*.md")
    for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
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
    (end,) = [one for one in ends if any(line.lstrip("+").startswith(key + "=") for line in typed(one))]
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
    found = [product for product in probe.products() if product.name == "verl"]
    found += [probe.Product(name, True, f"{ascend}.0", "/there") for name in ("vllm", "vllm-ascend")]
    monkeypatch.setattr(probe, "products", lambda: tuple(found))
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

    found = re.findall(r"[`\n]\"?(\+{1,2}ray_kwargs\.[^`\"\s\\]+)", page.read_text(encoding="utf-8"))
    lines = sorted({*found})
    assert lines
    config = overridden("ppo_trainer", lines)
    environment = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)
    assert parse_and_validate_env_vars(environment) == environment


@pytest.mark.parametrize(("page", "block"), YAML)
def test_yaml_that_a_page_gives_switches_replay_on(page: str, block: str, tmp_path: Path) -> None:
    given = OmegaConf.create(block)
    replay = given.actor_rollout_ref.actor.megatron.router_replay
    lines = {f"{REPLAY}.{name}": value for name, value in replay.items()}
    lines |= {name: str(tmp_path) for name in lines if name.endswith("_file")}
    flag = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    if (asked := OmegaConf.select(given, flag)) is not None:
        lines[flag] = asked
    config = job(lines)
    if HAS_LEGACY:
        config.trainer.use_legacy_worker_impl = "disable"
    assert verl_config.check_actor(config.actor_rollout_ref, legacy=False) == replay.mode
