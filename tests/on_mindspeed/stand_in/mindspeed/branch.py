"""What differs between MindSpeed's branches, and which of them is played.

A variable names the branch; by itself it is the one that goes with the Megatron-core that is there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "MINDSPEED_STAND_IN"


@dataclass(frozen=True)
class Branch:
    """What a branch has.

    Attributes:
        init_subclass: subclasses of TransformerConfig get MindSpeed's arguments as fields.
        restores_methods: removing a patch also puts back a class's method, not only names in modules.
        replaces_checkpointed_forward: TransformerBlock recomputes by a function of MindSpeed's.
        replaces_te_linear: Megatron's TELinear is a class of MindSpeed's.
        over_megatron_adaptor: it imports MegatronAdaptor, which patches torch, and shares its features' list,
            its arguments and its class of a patch (from 1881e01a on).
        lends_transformer_engine: names of Transformer Engine are dummies; else TransformerEngineNPU is there.
        has_fix_router, has_mc2, has_fast_ops, has_score_reuse: the features exist.
        fixes_score_function: fix_router wraps the functions that Megatron routes by from 0.14 on.
        ignored: arguments that don't reach a config where they are None.
    """

    init_subclass: bool = False
    restores_methods: bool = False
    replaces_checkpointed_forward: bool = False
    replaces_te_linear: bool = False
    over_megatron_adaptor: bool = False
    lends_transformer_engine: bool = True
    has_fix_router: bool = True
    has_mc2: bool = True
    has_fast_ops: bool = False
    has_score_reuse: bool = False
    fixes_score_function: bool = False
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
    "core_r0.18.0": Branch(
        restores_methods=True,
        over_megatron_adaptor=True,
        lends_transformer_engine=False,
        has_fast_ops=True,
        has_score_reuse=True,
        fixes_score_function=True,
        ignored=("rope_type",),
    ),
}


def played() -> Branch:
    """The branch that this process's environment asks for."""
    return BRANCHES[os.environ.get(VARIABLE) or _beside_megatron()]


def _beside_megatron() -> str:
    """The branch for this Megatron-core: 0.16 has its own router_replay, 0.18 one module for recomputes."""
    spec = find_spec("megatron") and find_spec("megatron.core")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
    marks = {"core_r0.18.0": "recompute.py", "core_r0.16.0": "transformer/moe/router_replay.py"}
    there = (name for name, file in marks.items() if any((folder / file).exists() for folder in folders))
    return next(there, "2.3.0")


BRANCH = played()
