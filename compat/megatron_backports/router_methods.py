"""Methods on router instances that their class lacks, or has wrong; the class is left as it is.

A method of the router itself would keep it alive in a cycle, and couldn't be unpickled where its class has
none of that name. So each is bound to a small object beside the router, made anew in a copy or from a pickle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, ClassVar

from npu_replay.compat.patching.patches import Patch, Patches

_ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
_LOSSES = ("aux_loss", "seq_aux_loss")
"""The auxiliary losses of the releases that lack the methods."""


class Lent:
    """Methods for one router.

    Attributes:
        why: what they are good for, for the report.
        names: those that the router was lent.
    """

    why: ClassVar[str]

    def __init__(self, router: Any) -> None:
        self._router = weakref.ref(router)
        self.names: list[str] = []
        _everyone.add(self)
        _report(type(self))

    @property
    def router(self) -> Any:
        """Whose methods they are."""
        return self._router()

    def of_class(self, name: str) -> Any:
        """The method of that name of the router's class, bound; looked up each time: MindSpeed patches it."""
        router = self.router
        kind = type(router)
        found = next(vars(one)[name] for one in kind.__mro__ if name in vars(one))
        return found.__get__(router, kind)  # not the class's attribute: some wrappers bind at each access

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.router,), {"names": self.names}


_everyone: weakref.WeakSet[Lent] = weakref.WeakSet()
_patches = Patches("methods of TopKRouter")


class AuxLoss(Lent):
    """What a router says of its auxiliary loss."""

    why = "as from Megatron-core 0.14 on"

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """The coefficient of this auxiliary loss; 0 if the router has another or none."""
        router = self.router
        coefficient: float = router.config.moe_aux_loss_coeff if router.routing_type == aux_loss_type else 0.0
        return coefficient

    def is_aux_loss_enabled(self) -> bool:
        """Has it any auxiliary loss?"""
        return any(self.router.get_aux_loss_coeff(kind) > 0 for kind in _LOSSES)


def equip(router: Any) -> None:
    """Give a router the methods that its class lacks. Twice is as good as once."""
    names = ("get_aux_loss_coeff", "is_aux_loss_enabled")
    lend(router, AuxLoss, [name for name in names if not hasattr(type(router), name)])


def lend(router: Any, kind: type[Lent], names: Iterable[str]) -> None:
    """Bind these methods of `kind` on the router, where it has nothing of its own by that name."""
    wanted = [name for name in names if name not in vars(router)]
    if not wanted:
        return
    lent = kind(router)
    lent.names = wanted
    for name in wanted:
        setattr(router, name, getattr(lent, name))


def unequip(router: Any, kind: type[Lent] = Lent) -> None:
    """Take what was lent off a router."""
    for name, value in list(vars(router).items()):
        if isinstance(value, MethodType) and isinstance(value.__self__, kind):
            delattr(router, name)


@dataclass(frozen=True, eq=False)
class _OnRouters(Patch):
    """One kind of methods on all routers, copies too: a line of the report."""

    @property
    def where(self) -> str:
        return f"{self.name} of each {_ROUTER}"

    def undo(self) -> bool:
        """Take them off every live router. Were all still there, with nobody's wrapper around one?"""
        covered = False
        for lent in list(_everyone):
            router = lent.router
            if type(lent) is self.owner and router is not None:
                unequip(router, self.owner)
                covered |= any(name in vars(router) for name in lent.names)
        return not covered


def _report(kind: type[Lent]) -> None:
    if not any(patch.owner is kind for patch in _patches):
        names = ", ".join(name for name, value in vars(kind).items() if isinstance(value, FunctionType))
        _patches.add(_OnRouters(kind, names, kind.why, None, None))
