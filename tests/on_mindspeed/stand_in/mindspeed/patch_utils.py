"""How MindSpeed patches: a table by name, orig_func taken once, and a scan of sys.modules by identity."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from mindspeed.branch import BRANCH


def _missing(name: str) -> Callable[..., Any]:
    def dummy_function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"function {name} no exist")

    return dummy_function


class Patch:
    """What is to stand under one dotted name: a replacement, wrappers around it, or both."""

    def __init__(self, orig_func_name: str, new_func: Any, create_dummy: bool) -> None:
        owner, _, name = orig_func_name.rpartition(".")
        self.orig_module_name, self.orig_func_name = (owner, name) if owner else (name, None)
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Any] = []
        self.create_dummy = create_dummy
        self.is_applied = False
        self.set_patch_func(_missing(orig_func_name) if new_func is None else new_func)

    def set_patch_func(self, new_func: Any) -> None:
        """Stack a wrapper, or set the one replacement."""
        if getattr(new_func, "__name__", "").endswith(("wrapper", "decorator")):
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
        owner, current = _resolve(self.orig_module_name, self.orig_func_name, self.create_dummy)
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
        """Put orig_func back where the final function still stands, outside MindSpeed."""
        if self.orig_func_name is not None:
            for holder in self._holders():
                _swap(holder, self.orig_func_name, self.final_patch_func, self.orig_func)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False

    def _holders(self) -> Iterator[Any]:
        methods = BRANCH.restores_methods and inspect.isclass(self.orig_module)
        for name, module in list(sys.modules.items()):
            if "mindspeed" in name or name == "torch.classes":
                continue
            yield getattr(module, self.orig_module_name.rpartition(".")[2], module) if methods else module


def _swap(holder: Any, name: str, old: Any, new: Any) -> None:
    # Not getattr: thousands of modules are asked for each patch, and some of them import something first.
    if getattr(holder, "__dict__", {}).get(name, _swap) is old:
        setattr(holder, name, new)


def _resolve(path: str, name: str | None, create_dummy: bool) -> tuple[Any, Any]:
    """The owner (a module, or a class in one) and what stands under the name; dummies where asked for."""
    owner = _owner(path, create_dummy)
    if name is None:
        return owner, None
    if not hasattr(owner, name):
        if inspect.isclass(owner) and not create_dummy:
            raise RuntimeError(f"no exist {name} of {owner}")
        if inspect.isclass(owner):
            return owner, _missing(name)
        setattr(owner, name, None)
    return owner, getattr(owner, name)


def _owner(path: str, create_dummy: bool) -> Any:
    found: Any = None
    walked = ""
    for part in path.split("."):
        walked = f"{walked}.{part}" if walked else part
        try:
            found = importlib.import_module(walked)
        except ModuleNotFoundError as error:
            if found is not None and hasattr(found, part):
                found = getattr(found, part)
            elif create_dummy:
                found = _dummy_module(walked, found)
            else:
                raise ModuleNotFoundError(error) from error
    return found


def _dummy_module(path: str, parent: Any) -> types.ModuleType:
    module = types.ModuleType(path)
    module.__file__ = "mindspeed.dummy_module.py"
    module.__spec__ = ModuleSpec(path, None)
    sys.modules[path] = module
    if parent is not None:
        setattr(parent, path.rpartition(".")[2], module)
    return module


if BRANCH.over_megatron_adaptor:
    from megatron_adaptor.patches.patch_manager import Patch  # type: ignore[assignment]


class MindSpeedPatchesManager:
    """The table of all patches that any feature has ever registered."""

    patches_info: dict[str, Patch] = {}  # noqa: RUF012 - one for the process, as in the original

    @staticmethod
    def register_patch(orig_func_name: str, new_func: Any = None, *, create_dummy: bool = False) -> None:
        """Note a patch; `apply_patches` makes it."""
        patches = MindSpeedPatchesManager.patches_info
        if orig_func_name in patches:
            patches[orig_func_name].set_patch_func(new_func)
        else:
            patches[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)

    @staticmethod
    def remove_patches() -> None:
        """Undo and forget all; the names stay in the table, with what was there first."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @staticmethod
    def apply_patches() -> None:
        """Make those that aren't made yet."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()
