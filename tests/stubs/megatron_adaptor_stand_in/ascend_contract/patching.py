"""How both products patch: a table by name, the original kept once, a scan of sys.modules by identity."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

_ABSENT = object()


class Patch:
    """What is to stand under one dotted name: a replacement, wrappers around it, or both."""

    restores_methods = True
    """Does removing a patch also put back a class's method, and not only names in modules?"""

    def __init__(self, path: str, new_func: Any) -> None:
        self.orig_module_name, _, self.orig_func_name = path.rpartition(".")
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.set_patch_func(new_func)

    def set_patch_func(self, new_func: Any) -> None:
        """Stack a wrapper, told by its name, or set the one replacement."""
        if getattr(new_func, "__name__", "").endswith("wrapper"):
            if new_func not in self.wrappers:
                self.wrappers.append(new_func)
        elif self.patch_func:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new_func
        self.is_applied = False

    def remove_wrappers(self) -> None:
        self.wrappers = []

    def apply_patch(self) -> None:
        """Set it on the owner, whatever stands there by now, and on every module with the same object."""
        if self.is_applied:
            return
        owner = _owner(self.orig_module_name)
        current = getattr(owner, self.orig_func_name)
        if self.orig_module is None:
            self.orig_module = owner
            self.orig_func = current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.orig_func_name, final)
        for module in list(sys.modules.values()):
            _swap(module, self.orig_func_name, current, final)
        self.is_applied = True
        self.final_patch_func = final

    def remove_patch(self) -> None:
        """Put the original back where the final function still stands; the original stays known."""
        for holder in self._holders():
            _swap(holder, self.orig_func_name, self.final_patch_func, self.orig_func)
        self.patch_func = None
        self.final_patch_func = None
        self.is_applied = False

    def _holders(self) -> Iterator[Any]:
        """Yield each module, or its class of the owner's name, outside both products."""
        methods = self.restores_methods and inspect.isclass(self.orig_module)
        owner = self.orig_module_name.rpartition(".")[2]
        for name, module in list(sys.modules.items()):
            if "megatron_adaptor" not in name and "mindspeed" not in name and name != "torch.classes":
                yield getattr(module, "__dict__", {}).get(owner, module) if methods else module


class PatchesManager:
    """The table of all patches that any feature has ever registered; each product derives its own."""

    patches_info: ClassVar[dict[str, Patch]]
    kind: ClassVar[type[Patch]] = Patch

    def __init_subclass__(cls) -> None:
        cls.patches_info = {}

    @classmethod
    def register_patch(cls, path: str, new_func: Any) -> None:
        """Note a patch; `apply_patches` makes it."""
        if path in cls.patches_info:
            cls.patches_info[path].set_patch_func(new_func)
        else:
            cls.patches_info[path] = cls.kind(path, new_func)

    @classmethod
    def remove_patches(cls) -> None:
        """Undo and forget all; the names stay in the table, with what was there first."""
        for patch in cls.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @classmethod
    def apply_patches(cls) -> None:
        """Make those that aren't made yet."""
        for patch in cls.patches_info.values():
            patch.apply_patch()


def _swap(holder: Any, name: str, old: Any, new: Any) -> None:
    # Not getattr: thousands of modules are asked for each patch, and some of them import something first.
    if getattr(holder, "__dict__", {}).get(name, _ABSENT) is old:
        setattr(holder, name, new)


def _owner(path: str) -> Any:
    """Return the module, or the class in one, of this path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
