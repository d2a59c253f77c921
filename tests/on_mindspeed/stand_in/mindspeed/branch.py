"""What differs between MindSpeed's branches, and which of them is played.

`MINDSPEED_STAND_IN` names the branch; by itself it is the one that goes with the Megatron-core that is there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Branch:
    """What a branch has.

    Attributes:
        init_subclass: subclasses of TransformerConfig get MindSpeed's arguments as fields.
        restores_methods: removing a patch also puts back a class's method, not only names in modules.
        replaces_checkpointed_forward: TransformerBlock recomputes by a function of MindSpeed's.
        replaces_te_linear: Megatron's TELinear is a class of MindSpeed's.
        has_fix_router, has_mc2: the features exist.
        ignored: arguments that don't reach a config where they are None.
    """

    init_subclass: bool = False
    restores_methods: bool = False
    replaces_checkpointed_forward: bool = False
    replaces_te_linear: bool = False
    has_fix_router: bool = True
    has_mc2: bool = True
    ignored: tuple[str, ...] = ()


BRANCHES = {
    "2.3.0": Branch(has_mc2=False),
    "26.1.0": Branch(init_subclass=True, restores_methods=True, replaces_checkpointed_forward=True),
    "core_r0.16.0": Branch(
        init_subclass=True,
        restores_methods=True,
        replaces_te_linear=True,
        has_fix_router=False,
        has_mc2=False,
        ignored=("rope_type",),
    ),
}


def _beside_megatron() -> str:
    """The branch for this Megatron-core: from 0.16 on it has a router_replay of its own."""
    spec = find_spec("megatron.core")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    newer = any((Path(folder) / "transformer/moe/router_replay.py").exists() for folder in folders)
    return "core_r0.16.0" if newer else "2.3.0"


BRANCH = BRANCHES[os.environ.get("MINDSPEED_STAND_IN") or _beside_megatron()]
