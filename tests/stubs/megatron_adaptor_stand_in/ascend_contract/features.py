"""A feature, what is done to all of them, and the arguments that turn them on."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ascend_contract.patching import PatchesManager

Patched = Callable[[Any], dict[str, Any]]
"""Of the arguments: what is put where, «module:name» for what is imported only then."""


@dataclass
class Feature:
    """A feature is on where an argument of its name is true; without a name always.

    Attributes:
        manager: the table that its patches go into.
        arguments: what the parser is given for each.
        check: called with every config before Megatron's own checks, whether the feature is on or not.
        before: patches that come before megatron is imported.
    """

    manager: type[PatchesManager]
    name: str = ""
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    check: Callable[[Any], None] = lambda args: None
    before: Patched = lambda args: {}
    patches: Patched = lambda args: {}
    applied: set[str] = field(default_factory=set)

    def is_need_apply(self, args: Any) -> bool:
        return not self.name or bool(getattr(args, self.name, None))

    def register(self, when: str, args: Any) -> None:
        """Register what comes "before" megatron's import, or its other "patches"."""
        if when in self.applied or not self.is_need_apply(args):
            return
        self.applied.add(when)
        for path, new in getattr(self, when)(args).items():
            if isinstance(new, str):
                module, _, what = new.partition(":")
                new = getattr(importlib.import_module(module), what)
            self.manager.register_patch(path, new)


class FeaturesManager:
    """What is done to all features, in the order of their list; each product derives its own."""

    FEATURES_LIST: ClassVar[list[Feature]] = []
    manager: ClassVar[type[PatchesManager]]

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        cls._apply("before", args)

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        cls._apply("patches", args)

    @classmethod
    def _apply(cls, when: str, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register(when, args)
        for manager in dict.fromkeys(feature.manager for feature in cls.FEATURES_LIST):
            manager.apply_patches()

    @classmethod
    def remove_patches(cls) -> None:
        """Undo this product's patches alone."""
        for feature in cls.FEATURES_LIST:
            if feature.manager is cls.manager:
                feature.applied.clear()
        cls.manager.remove_patches()

    @classmethod
    def pre_validate_features_args(cls, config: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.check(config)


class Arguments:
    """The arguments of a product: megatron.training's, once they are set, else its own, parsed once."""

    def __init__(self, features: type[FeaturesManager]) -> None:
        self._features = features
        self._own: argparse.Namespace | None = None

    def get_mindspeed_args(self, get_defaults: bool = False) -> argparse.Namespace:
        """The product's own; MegatronAdaptor's have the name that they had in MindSpeed."""
        if self._own is not None and not get_defaults:
            return self._own
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for feature in self._features.FEATURES_LIST:
            for name, how in feature.arguments.items():
                parser.add_argument(f"--{name.replace('_', '-')}", **how)
        args, _ = parser.parse_known_args([] if get_defaults else None)
        if not get_defaults:
            self._own = args
        return args

    def get_full_args(self) -> Any:
        try:
            from megatron.training.global_vars import get_args

            return get_args() or self.get_mindspeed_args()
        except (ImportError, AssertionError):
            return self.get_mindspeed_args()

    def repatch(self, features: type[FeaturesManager], args: dict[str, Any]) -> None:
        """Undo the patches of `features`, take over `args` for good, and patch anew."""
        features.remove_patches()
        full_args = self.get_full_args()
        for name, value in args.items():
            setattr(full_args, name, value)
        features.apply_features_pre_patches(full_args)
        features.apply_features_patches(full_args)
