"""The lines of config in docs/verl-ascend.md and docs/verl-cuda.md: verl composes them, and replay is on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from npu_replay.compat.verl import config as verl_config
from verl_configs import CONFIGS, HAS_LEGACY, engine_workers_replay

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```bash\n((?:\+?actor_rollout_ref\.[^\n]+\n)+)```")
LINES = [
    (page.parent.name, page.stem, found.group(1))
    for page in [*DOCS.glob("verl-*.md"), *DOCS.glob("zh/verl-*.md")]
    for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
]


def test_the_pages_have_such_blocks() -> None:
    assert [page for _, page, _ in LINES].count("verl-cuda") == 5
    assert [page for _, page, _ in LINES].count("verl-ascend") in (3, 6)


@pytest.mark.parametrize(("folder", "page", "block"), LINES)
def test_lines_that_a_page_gives_switch_replay_on(folder: str, page: str, block: str) -> None:
    lines = block.replace("\\\n", " ").split()
    fsdp = any("fsdp_config" in line for line in lines)
    legacy = any(line.startswith("actor_rollout_ref.actor.router_replay") for line in lines)
    if legacy and not HAS_LEGACY:
        pytest.skip("0.7 has these workers")
    if not legacy and not engine_workers_replay():
        pytest.skip("this release's engine workers don't replay")
    if HAS_LEGACY and not legacy:
        lines.append("trainer.use_legacy_worker_impl=disable")
    if fsdp:
        lines.append("actor_rollout_ref.actor.strategy=fsdp2")
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONFIGS), version_base=None):
        trainer = "ppo_trainer" if fsdp else "ppo_megatron_trainer"
        config = compose(config_name=trainer, overrides=["actor_rollout_ref.rollout.name=vllm", *lines])
    actor = config.actor_rollout_ref
    OmegaConf.set_readonly(config, False)
    verl_config.check_actor(actor, legacy=legacy)
    assert f"mode={verl_config.mode_of(actor, legacy=legacy)}" in block
    assert actor.model.external_lib == "npu_replay"
