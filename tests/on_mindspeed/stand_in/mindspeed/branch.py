"""What differs between MindSpeed's branches. The one that goes with the Megatron-core here is played."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Branch:
    """What a branch has.

    Attributes:
        restores_methods: removing a patch also puts back a class's method, not only names in modules.
        init_subclass: subclasses of TransformerConfig get MindSpeed's arguments as fields.
        over_megatron_adaptor: it imports MegatronAdaptor, which patches torch, and shares its features' list,
            its arguments and its class of a patch (from 1881e01a on); and there is moe_router_score_reuse.
    """

    restores_methods: bool = True
    init_subclass: bool = False
    over_megatron_adaptor: bool = False


def _beside_megatron() -> Branch:
    """The branch for this Megatron-core: 0.16 has its own router_replay, 0.18 one module for recomputes."""
    spec = find_spec("megatron") and find_spec("megatron.core")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
    if any((folder / "recompute.py").exists() for folder in folders):
        return Branch(over_megatron_adaptor=True)  # core_r0.18.0
    if any((folder / "transformer/moe/router_replay.py").exists() for folder in folders):
        return Branch(init_subclass=True)  # core_r0.16.0
    return Branch(restores_methods=False)  # 2.3.0


BRANCH = _beside_megatron()
