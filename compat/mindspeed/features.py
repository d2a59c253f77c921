"""Refuses the features of MindSpeed that can't be replayed.

Its other features call Megatron's TopKRouter as it is. Nothing of MindSpeed is changed or imported: its
settings are read off the model's config, to which it copies its arguments, and off the arguments themselves,
since its patches hold for every model of the process.

Asks:     the model's config, MindSpeed's arguments and its list of patches.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import sys
from typing import Any

from npu_replay.errors import RouterError

_ADAPTOR = "mindspeed.megatron_adaptor"
_ADAPTORS_ARGUMENTS = "megatron_adaptor.utils.args_utils"
_REGISTRIES = {
    "MegatronAdaptor": ("megatron_adaptor.patches.patch_manager", "PatchesManager", "megatron_adaptor"),
    "MindSpeed": ("mindspeed.patch_utils", "MindSpeedPatchesManager", _ADAPTOR),
}
"""By product: the module of its registry of patches, the class there, and the module that applies them."""
REFUSED = {
    "fix_router": "it takes experts in turn after the top-k, whatever was chosen; meant for timing runs",
    "moe_tp_extend_ep": "its own routing runs over the tokens of all tensor-parallel ranks and drops score "
    "function, expert bias and groups; spread the experts by expert_model_parallel_size instead",
}


def refuse_features(config: Any, path: str) -> None:
    """Refuse a router whose choice MindSpeed overrides; the error names the feature and the reason."""
    # MindSpeed's arguments, once it has read them: Megatron's own where those are set. From core_r0.18.0 on
    # they are MegatronAdaptor's, which may turn MindSpeed's features on by itself.
    product: Any = sys.modules.get("mindspeed.args_utils") or sys.modules.get(_ADAPTORS_ARGUMENTS)
    read = product is not None and {_ADAPTOR, "mindspeed_llm", _ADAPTORS_ARGUMENTS} & sys.modules.keys()
    arguments = product.get_full_args() if read else None
    for feature, reason in REFUSED.items():
        off = not (getattr(config, feature, False) or getattr(arguments, feature, False))
        problem, expected = f"MindSpeed's {feature} can't be replayed", f"{feature}=False"
        RouterError.unless(off, problem, expected, f"{feature}=True", reason, path)


def refuse_half_import() -> None:
    """Refuse to work with a product whose import failed half way, where somebody caught the error."""
    for product, (registry, manager, adaptor) in _REGISTRIES.items():
        known = _registry(registry, manager)
        applied = [name for name, patch in known.items() if patch.is_applied]
        if not applied or len(applied) == len(known) or adaptor in sys.modules:
            continue
        got = f"{len(applied)}, without {next(name for name in known if name not in applied)}"
        problem, expected = f"{product} is half imported", f"all {len(known)} of its patches in place"
        cause = (
            f"its import raised, and somebody caught it; «python -c 'import {adaptor}'» shows it (a Megatron "
            "of another release than it is made for, a torch_npu that doesn't load)"
        )
        raise RouterError(problem, where=f"import {adaptor}", expected=expected, got=got, cause=cause)


def registries() -> list[dict[str, Any]]:
    """Return the registries of both products, each with its patches by the full name of what they change."""
    return [_registry(registry, manager) for registry, manager, _ in _REGISTRIES.values()]


def _registry(module: str, manager: str) -> dict[str, Any]:
    """Return one registry; empty where its product isn't imported."""
    product: Any = sys.modules.get(module)
    return {} if product is None else getattr(product, manager).patches_info
