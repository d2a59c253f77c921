"""Tells what adapts Megatron to an NPU here, MindSpeed or MegatronAdaptor, and whether it fits this Megatron.

Up to core_r0.16.0 a branch of MindSpeed is for one release of Megatron-core, and its distribution has that
release for a version. From core_r0.17.0 on MindSpeed needs MegatronAdaptor and TransformerEngineNPU, and its
package imports the first. There its distribution says 0.12.1, whatever Megatron-core it is for.
MegatronAdaptor also goes without MindSpeed.

Asks:     the source of the products; none of them is imported.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from npu_replay.compat.mindspeed.features import REFUSED
from npu_replay.compat.probe import ADAPTOR, TE_NPU, Capability, Product, find, text_of, unusable

UNDER_MINDSPEED = "replay under MindSpeed"
UNDER_ADAPTOR = "replay under MegatronAdaptor"
MODULES = {UNDER_ADAPTOR: "megatron_adaptor", UNDER_MINDSPEED: "mindspeed.megatron_adaptor"}
"""By capability, the module that changes Megatron as it is imported, in the order of a job's imports. All of
them come before Megatron's."""

_LAYERED = "core_r0.17.0 or later"
_DEV = ((0, 14), "0.16.0rc0")
"""The version of MindSpeed's branch dev, the same as core_r0.14.0's, and what the Megatron-LM says of itself
that it is made for."""


def before_megatron(products: Iterable[Product]) -> tuple[str, ...]:
    """Return the modules that a job imports before Megatron, in their order."""
    usable = {product.name for product in products if product.usable}
    names = {UNDER_ADAPTOR: ADAPTOR, UNDER_MINDSPEED: "mindspeed"}
    return tuple(module for name, module in MODULES.items() if names[name] in usable)


def capabilities(products: Iterable[Product]) -> tuple[Capability, Capability]:
    """Return the capabilities under MindSpeed and under MegatronAdaptor, as far as the source tells."""
    by_name = {product.name: product for product in products}
    adaptor = by_name[ADAPTOR]
    if adaptor.usable:
        under_adaptor = Capability(UNDER_ADAPTOR, "works", "MegatronAdaptor changes nothing that routes")
    else:
        under_adaptor = unusable(UNDER_ADAPTOR, adaptor)
    return _under_mindspeed(by_name), under_adaptor


def _under_mindspeed(by_name: dict[str, Product]) -> Capability:
    mindspeed = by_name["mindspeed"]
    megatron = by_name["megatron-core"]
    if not mindspeed.usable:
        why = mindspeed.problem or "MindSpeed is not installed"
        return Capability(UNDER_MINDSPEED, "broken" if mindspeed.problem else "missing", why)
    layered = _imports_adaptor(mindspeed)
    clash = _clash_of_layered(by_name) if layered else _clash_of_versions(mindspeed, megatron)
    if clash is not None:
        return clash
    says = f", though its metadata says {mindspeed.version}" if mindspeed.version else ""
    whose = f"MindSpeed of {_LAYERED}{says}; " if layered else ""
    why = f"{whose}recompute of moe_fb_overlap too; refused: {', '.join(REFUSED)}"
    if megatron.usable and find("megatron.training") is None:
        why += "; without what needs megatron.training, which a wheel doesn't have"
    return Capability(UNDER_MINDSPEED, "works", why)


def release_of(mindspeed: Product) -> str:
    """Return MindSpeed's release, or which branches it may be of; empty where nothing tells."""
    return _LAYERED if _imports_adaptor(mindspeed) else mindspeed.version


def _imports_adaptor(mindspeed: Product) -> bool:
    """Return whether this MindSpeed is a layer over MegatronAdaptor."""
    source = text_of(Path(mindspeed.where, "__init__.py"))
    return re.search(r"^\s*(import|from) megatron_adaptor\b", source, re.MULTILINE) is not None


def _clash_of_layered(by_name: dict[str, Product]) -> Capability | None:
    """Return what a MindSpeed over MegatronAdaptor lacks here. Whether it fits Megatron its import shows."""
    lacking = [name for name in (ADAPTOR, TE_NPU) if not by_name[name].usable]
    if not lacking:
        return None
    why = f"this MindSpeed is of {_LAYERED}, which needs {' and '.join(lacking)}: not installed"
    remedy = (
        "install them from gitcode.com/Ascend: MegatronAdaptor of the branch that is called as MindSpeed's, "
        "TransformerEngineNPU of main"
    )
    if by_name["transformer-engine"].usable:
        remedy = f"pip uninstall transformer_engine, which is NVIDIA's here; {remedy}"
    return Capability(UNDER_MINDSPEED, "broken", why, remedy)


def _clash_of_versions(mindspeed: Product, megatron: Product) -> Capability | None:
    """Return how a MindSpeed before core_r0.17.0 differs in release from Megatron-core."""
    wanted = _release(mindspeed)
    if not wanted or not megatron.usable or wanted == _release(megatron):
        return None
    if (wanted, megatron.version) == _DEV:
        return None
    why = f"this MindSpeed is made for Megatron-core {mindspeed.version}, and {megatron.version} is here"
    remedy = "take the branch of MindSpeed that is named after this Megatron-core, or the other way round"
    return Capability(UNDER_MINDSPEED, "broken", why, remedy)


def _release(product: Product) -> tuple[int, ...]:
    """Return major and minor; nothing where the product doesn't say its version."""
    return tuple(map(int, re.findall(r"\d+", product.version)[:2]))
