"""Refuses the features of MindSpeed that can't be replayed.

Its other features call Megatron's TopKRouter as it is. Nothing of MindSpeed is changed or imported: its
settings are read off the model's config, to which it copies its arguments, and off the arguments themselves,
since its patches hold for every model of the process.

Asks:     the model's config and MindSpeed's arguments.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import sys
from typing import Any

from npu_replay.errors import RouterError

_ARGUMENTS = {
    "mindspeed.args_utils": {"mindspeed.megatron_adaptor", "mindspeed_llm"},
    "megatron_adaptor.utils.args_utils": {"megatron_adaptor"},
}
"""The modules that keep arguments, and those whose import has read them."""
REFUSED = {
    "fix_router": "it takes experts in turn after the top-k, whatever was chosen; meant for timing runs",
    "moe_tp_extend_ep": "its own routing runs over the tokens of all tensor-parallel ranks and drops score "
    "function, expert bias and groups; spread the experts by expert_model_parallel_size instead",
}


def refuse_features(config: Any, path: str) -> None:
    """Refuse a router whose choice MindSpeed overrides; the error names the feature and the reason."""
    sources = [config, *_arguments()]
    for feature, reason in REFUSED.items():
        if any(getattr(source, feature, False) for source in sources):
            raise RouterError(
                f"MindSpeed's {feature} can't be replayed",
                where=path,
                expected=f"{feature}=False",
                got=f"{feature}=True",
                cause=reason,
            )


def _arguments() -> list[Any]:
    """Return the arguments of each product that has read its own; asked earlier, it would read them now.

    They are Megatron's where those are set. Newer MindSpeed's are MegatronAdaptor's, whose import may turn
    MindSpeed's features on before `mindspeed.megatron_adaptor` is imported.
    """
    read = [name for name, entries in _ARGUMENTS.items() if entries & sys.modules.keys()]
    modules: list[Any] = [sys.modules[name] for name in read if name in sys.modules]
    return [module.get_full_args() for module in modules]
