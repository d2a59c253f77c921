"""verl's own configs, composed by Hydra as its trainer composes them, with lines of a user's.

Most of a test's time went into reading the same texts: so YAML is read by libyaml, and an interpolation is
parsed once.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verl
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, base, open_dict

yaml.SafeLoader = yaml.CSafeLoader  # whose subclass OmegaConf makes for each file
base.parse = functools.cache(base.parse)

CONFIGS = Path(verl.__path__[0]) / "trainer" / "config"
HAS_LEGACY = (Path(verl.__path__[0]) / "workers" / "megatron_workers.py").is_file()
"""0.7.x"""
PADS_TO_MINI_BATCH = "pad_bshd_to_minibatch_max" in (CONFIGS / "engine" / "megatron.yaml").read_text()
"""0.9.1 and later"""

FLAG = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
OLD = "actor_rollout_ref.actor.router_replay.mode"
NEW = "actor_rollout_ref.actor.megatron.router_replay.mode"
FSDP = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
UNPADDED = {
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.megatron.use_remove_padding": True,
}


def overridden(name: str, lines: Iterable[str] = (), *, folder: Path = CONFIGS) -> DictConfig:
    """A trainer's config with these overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(config_name=name, overrides=list(lines))


composed = functools.cache(lambda name: pickle.dumps(overridden(name)))
"""A trainer's config, pickled: OmegaConf's own copy takes eight times as long."""


def job(lines: dict[str, Any] | None = None, *, trainer: str = "ppo_megatron_trainer") -> DictConfig:
    """A config with a rollout engine, packed sequences and `lines`."""
    config: DictConfig = pickle.loads(composed(trainer))
    unpadded = {name: on for name, on in UNPADDED.items() if "megatron" in trainer or "megatron" not in name}
    with open_dict(config):
        for name, value in {"actor_rollout_ref.rollout.name": "vllm", **unpadded, **(lines or {})}.items():
            OmegaConf.update(config, name, value, force_add=True)
    return config
