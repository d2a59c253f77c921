"""One process with MegatronAdaptor in it, with MindSpeed or without: are the flags of configs kept?

npu_replay is imported where the task says so, and no earlier: which comes first is a part of what is tried.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from on_mindspeed.processes import lent_at_import
from on_mindspeed.worker import CLASSES, FLAGS, SMALL, config_class

MODULES = {
    "adaptor": "megatron_adaptor",
    "mindspeed": "mindspeed.megatron_adaptor",
    "npu_replay": "npu_replay",
}
REPLAY = FLAGS[:2]
BY_ITSELF = "fails by itself"
"""MegatronAdaptor's repatch() drops MindSpeed's wrapper of the constructor, and its checks fail."""


def orders(task: dict[str, Any]) -> dict[str, list[str]]:
    """Import in the task's "order", then patch anew in every way; return what is wrong after each step.

    Or why these two products don't go together, in "unsupported".
    """
    torch.set_num_threads(1)
    for name in task["order"]:
        with lent_at_import():
            importlib.import_module(MODULES[name])
    if {"mindspeed", "adaptor"} < set(task["order"]) and subclasses_get_arguments():
        return {
            "unsupported": ["this MindSpeed's arguments are fields of the classes that MegatronAdaptor makes"]
        }

    import npu_replay

    wrong = {"import": faults()}
    for name, act in ways_to_patch_anew(task["order"]).items():
        act()
        wrong[name] = faults()
    npu_replay.uninstall()
    for name, act in {"uninstall": list, **ways_to_patch_anew(task["order"])}.items():
        act()
        wrong[f"uninstalled, {name}"] = left()
    return wrong


def subclasses_get_arguments() -> bool:
    """Return whether MindSpeed makes fields of its arguments, as before core_r0.17.0; a config then fails."""
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return any(name.endswith(".__init_subclass__") for name in MindSpeedPatchesManager.patches_info)


def ways_to_patch_anew(order: list[str]) -> dict[str, Callable[[], object]]:
    """Return by name: `repatch` of each product, alternating; and its manager by hand, as vime does."""
    ways: dict[str, Callable[[], object]] = {}
    products = [name for name in ("mindspeed", "adaptor") if name in order]
    for turn in ("first", "second"):
        for name in products:
            repatch = importlib.import_module(MODULES[name]).repatch
            ways[f"{name}, {turn} repatch"] = functools.partial(repatch, {})
        products.reverse()
    if "adaptor" in order:
        ways["adaptor by hand"] = by_hand
    return ways


def by_hand() -> None:
    from megatron_adaptor.features_manager.features_manager import FeaturesManager
    from megatron_adaptor.utils.args_utils import get_full_args

    FeaturesManager.remove_patches()
    FeaturesManager.apply_features_pre_patches(get_full_args())
    FeaturesManager.apply_features_patches(get_full_args())


def faults() -> list[str]:
    """Return what is wrong with the flags of a config, and with the report."""
    found = []
    try:
        config_class(CLASSES[0])(**SMALL)
    except AttributeError as error:
        return [f"{BY_ITSELF}: {error}"]
    for name in CLASSES:
        for flag in REPLAY:
            made = config_class(name)(**SMALL, **{flag: True})
            for config in (made, dataclasses.replace(made, num_layers=3)):
                lost = [other for other in REPLAY if not getattr(config, other, False)]
                found += [f"{name}, {flag}: {other} is lost" for other in lost]
        if getattr(config_class(name)(**SMALL), FLAGS[0]):
            found.append(f"{name}: on without being asked for")
    listed = [one for one in reported() if "Config.__init__" in one]
    return found + [f"the report lists {len(listed)} constructors of configs"] * (len(listed) != len(CLASSES))


def left() -> list[str]:
    """Return what is left of npu_replay after uninstall()."""
    try:
        config = config_class(CLASSES[0])(**SMALL)
    except AttributeError as error:
        return [f"{BY_ITSELF}: {error}"]
    return ["a flag is left"] * hasattr(config, FLAGS[0]) + reported()


def reported() -> list[str]:
    """Return the names that the report lists as changed."""
    import npu_replay

    return [patch.where for patch in npu_replay.report().patches]
