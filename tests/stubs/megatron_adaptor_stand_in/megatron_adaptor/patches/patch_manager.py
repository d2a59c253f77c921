"""How MegatronAdaptor patches: a registry by name, and the original that was there the first time."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any


class Patch:
    """Holds what is to stand under one dotted name: a replacement, wrappers around it, or both."""

    def __init__(self, orig_func_name: str, new_func: Any, create_dummy: bool = False) -> None:
        self.orig_module_name, _, self.orig_func_name = orig_func_name.rpartition(".")
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.create_dummy = create_dummy
        self.is_applied = False
        self.set_patch_func(new_func)

    def set_patch_func(self, new_func: Any, force_patch: bool = False) -> None:
        """Stack a wrapper, or set the one replacement."""
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func not in self.wrappers:
                self.wrappers.append(new_func)
        elif self.patch_func and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new_func
        self.is_applied = False

    def remove_wrappers(self) -> None:
        self.wrappers = []

    def apply_patch(self) -> None:
        """Set it on the owner over the first original, whatever stands there by now."""
        if self.is_applied:
            return
        owner = _owner(self.orig_module_name)
        if self.orig_module is None:
            self.orig_module = owner
            self.orig_func = getattr(owner, self.orig_func_name)
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.orig_func_name, final)
        self.is_applied = True
        self.final_patch_func = final

    def remove_patch(self) -> None:
        """Put the original back where the final function still stands, outside the two products."""
        name = self.orig_module_name.rpartition(".")[2]
        for path, module in list(sys.modules.items()):
            if "megatron_adaptor" in path or "mindspeed" in path:
                continue
            inside = vars(module).get(name) if inspect.isclass(self.orig_module) else module
            if getattr(inside, "__dict__", {}).get(self.orig_func_name) is self.final_patch_func is not None:
                setattr(inside, self.orig_func_name, self.orig_func)
        self.patch_func = None
        self.final_patch_func = None
        self.is_applied = False


def _owner(path: str) -> Any:
    """Return the module of this name, or the class in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


class PatchesManager:
    """Keeps all patches that any feature has ever registered."""

    patches_info: dict[str, Patch] = {}  # noqa: RUF012 - one for the process, as in the original

    @classmethod
    def register_patch(
        cls, orig_func_name: str, new_func: Any, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Note a patch; `apply_patches` makes it."""
        if orig_func_name in cls.patches_info:
            cls.patches_info[orig_func_name].set_patch_func(new_func, force_patch)
        else:
            cls.patches_info[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)

    @classmethod
    def remove_patches(cls) -> None:
        """Undo and forget all; the names stay in the registry, with what was there first."""
        for patch in cls.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @classmethod
    def apply_patches(cls) -> None:
        """Make those that aren't made yet."""
        for patch in cls.patches_info.values():
            patch.apply_patch()
