"""How MegatronAdaptor patches: a table by name, the original kept once, a scan of sys.modules by identity.

The same as MindSpeed's, with a table of its own. MindSpeed from 1881e01a on makes its table of this `Patch`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

_ABSENT = object()


def _missing(name: str) -> Callable[..., Any]:
    def dummy_function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"function {name} no exist")

    return dummy_function


class Patch:
    """What is to stand under one dotted name: a replacement, wrappers around it, or both."""

    def __init__(self, orig_func_name: str, new_func: Any, create_dummy: bool) -> None:
        owner, _, name = orig_func_name.rpartition(".")
        self.orig_module_name = owner or name
        self.orig_func_name = name if owner else None
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.create_dummy = create_dummy
        self.is_applied = False
        self.set_patch_func(_missing(orig_func_name) if new_func is None else new_func)

    def set_patch_func(self, new_func: Any, force_patch: bool = False) -> None:
        """Stack a wrapper, told by its name, or set the one replacement."""
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
            if new_func not in self.wrappers:
                self.wrappers.append(new_func)
        elif self.patch_func and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new_func
        self.is_applied = False

    def remove_wrappers(self, wrapper_names: str | list[str] | None = None) -> None:
        """Forget the wrappers of these names, or all."""
        names = [wrapper_names] if isinstance(wrapper_names, str) else wrapper_names
        self.wrappers = [one for one in self.wrappers if names is not None and one.__name__ not in names]

    def apply_patch(self) -> None:
        """Set it on the owner, whatever stands there by now, and on every module with the same object."""
        if self.is_applied:
            return
        owner = _owner(self.orig_module_name, self.create_dummy)
        current = None if self.orig_func_name is None else _current(owner, self.orig_func_name)
        if self.orig_module is None:
            self.orig_module = owner
            self.orig_func = current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        if self.orig_func_name is not None:
            setattr(self.orig_module, self.orig_func_name, final)
            for module in list(sys.modules.values()):
                _swap(module, self.orig_func_name, current, final)
        self.is_applied = True
        self.final_patch_func = final

    def remove_patch(self) -> None:
        """Put the original back where the final function still stands; the original stays known."""
        if self.orig_func_name is not None:
            for holder in self._holders():
                _swap(holder, self.orig_func_name, self.final_patch_func, self.orig_func)
        self.patch_func = None
        self.final_patch_func = None
        self.is_applied = False

    def _holders(self) -> Iterator[Any]:
        """Yield each module, or its class of the owner's name, outside MegatronAdaptor and MindSpeed."""
        of_class = inspect.isclass(self.orig_module)
        owner = self.orig_module_name.rpartition(".")[2]
        for name, module in list(sys.modules.items()):
            if "megatron_adaptor" in name or "mindspeed" in name or name == "torch.classes":
                continue
            yield getattr(module, "__dict__", {}).get(owner, module) if of_class else module


class PatchesManager:
    """The table of all patches that any feature of MegatronAdaptor has registered."""

    patches_info: dict[str, Patch] = {}  # noqa: RUF012 - one for the process, as in the original

    @staticmethod
    def register_patch(
        orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Note a patch; `apply_patches` makes it."""
        known = PatchesManager.patches_info.get(orig_func_name)
        if known is None:
            PatchesManager.patches_info[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)
        else:
            known.set_patch_func(new_func, force_patch)

    @staticmethod
    def remove_patches() -> None:
        """Undo and forget all; the names stay in the table, with what was there first."""
        for patch in PatchesManager.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @staticmethod
    def apply_patches() -> None:
        """Make those that aren't made yet."""
        for patch in PatchesManager.patches_info.values():
            patch.apply_patch()

    @staticmethod
    def get_patch(orig_func_name: str) -> Patch | None:
        return PatchesManager.patches_info.get(orig_func_name)


def _swap(holder: Any, name: str, old: Any, new: Any) -> None:
    # Not getattr: thousands of modules are asked for each patch, and some of them import something first.
    if getattr(holder, "__dict__", {}).get(name, _ABSENT) is old:
        setattr(holder, name, new)


def _current(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        if inspect.isclass(owner):
            raise RuntimeError(f"no exist {name} of {owner}")
        setattr(owner, name, None)
    return getattr(owner, name)


def _owner(path: str, create_dummy: bool) -> Any:
    """Return the module, or the class in one, of this path; a dummy module where asked for."""
    owner: Any = None
    walked = ""
    for part in path.split("."):
        walked = f"{walked}.{part}" if walked else part
        try:
            owner = importlib.import_module(walked)
        except ModuleNotFoundError:
            if owner is not None and hasattr(owner, part):
                owner = getattr(owner, part)
            elif create_dummy:
                owner = _dummy_module(walked, owner)
            else:
                raise
    return owner


def _dummy_module(path: str, parent: Any) -> types.ModuleType:
    module = types.ModuleType(path)
    module.__file__ = "mindspeed.dummy_module.py"
    module.__spec__ = ModuleSpec(path, None)
    sys.modules[path] = module
    if parent is not None:
        setattr(parent, path.rpartition(".")[2], module)
    return module
