"""Methods on router instances that their class lacks, or has wrong; the class is left as it is.

A method of the router itself would keep it alive in a cycle, and couldn't be unpickled where its class has
none of that name. So each is bound to a small object beside the router, made anew in a copy or from a pickle.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar

import torch

from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import described

logger = logging.getLogger(__name__)

_ROUTER = "megatron.core.transformer.moe.router.TopKRouter"
_LOSSES = ("aux_loss", "seq_aux_loss")
"""The auxiliary losses of the releases that lack the methods."""
_COUNT = "_apply_expert_bias"


class RouterMethods:
    """Methods for one router: those of a subclass.

    Attributes:
        why: what they are good for, for the report.
        names: those that the router was given.
    """

    why: ClassVar[str]

    def __init__(self, router: Any, names: Iterable[str]) -> None:
        self._router = weakref.ref(router)
        self.names = list(names)
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
        return type(self), (self.router, self.names)


_everyone: weakref.WeakSet[RouterMethods] = weakref.WeakSet()
_patches = Patches("methods of TopKRouter")


def bind(router: Any, kind: type[RouterMethods], names: Iterable[str]) -> None:
    """Give a router these methods of `kind`, where it has nothing of its own by that name."""
    wanted = [name for name in names if name not in vars(router)]
    methods = kind(router, wanted) if wanted else None
    for name in wanted:
        setattr(router, name, getattr(methods, name))


def unbind(router: Any, kind: type[RouterMethods] = RouterMethods) -> None:
    """Take what was bound off a router."""
    for name, value in list(vars(router).items()):
        if isinstance(value, MethodType) and isinstance(value.__self__, kind):
            delattr(router, name)


def _report(kind: type[RouterMethods]) -> None:
    """One line for the methods of a kind, however many routers have them, copies too."""
    names = ", ".join(name for name, value in vars(kind).items() if isinstance(value, FunctionType))
    where = f"{names} of each {_ROUTER}"
    if not any(one.where == where for one in _patches):
        _patches.add(Change(where, kind.why, functools.partial(_unbind_all, kind)))


def _unbind_all(kind: type[RouterMethods]) -> bool:
    """Take them off every live router. Were all still there, with nobody's wrapper around one?"""
    covered = False
    for methods in list(_everyone):
        router = methods.router
        if type(methods) is kind and router is not None:
            unbind(router, kind)
            covered |= any(name in vars(router) for name in methods.names)
    return not covered


def equip(router: Any) -> None:
    """Give a router the methods that its class lacks, or has wrong. Twice is as good as once."""
    names = ("get_aux_loss_coeff", "is_aux_loss_enabled")
    bind(router, AuxLoss, [name for name in names if not hasattr(type(router), name)])
    count = getattr(type(router), _COUNT, None)
    if count is not None and getattr(router, "enable_expert_bias", False) and wants_column(count):
        bind(router, PaddedCounts, [_COUNT])


class AuxLoss(RouterMethods):
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


class PaddedCounts(RouterMethods):
    """A router's counts for its expert bias, of unpadded rows.

    `TopKRouter._apply_expert_bias` of Megatron-core 0.16 to 0.19 lays its padding mask, [rows], over the
    map's experts and not over its rows: an error, or with as many rows as experts counts of the wrong tokens.
    With a mask [rows, 1] it counts right. Other releases would be wrong with that; so each is asked first.
    """

    why = "leaves padding out of the counts for the expert bias"

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of a map, bool [rows, experts], but for those of the mask, bool [rows]."""
        router = self.router
        native = getattr(type(router), _COUNT)  # looked up: somebody else may have mended it since
        if padding_mask is not None and padding_mask.dim() == 1 and wants_column(native):
            padding_mask = padding_mask.unsqueeze(-1)
        native(router, routing_map, padding_mask=padding_mask)


@functools.lru_cache(maxsize=16)
def wants_column(native: Callable[..., None]) -> bool:
    """Does this `_apply_expert_bias` count right with the mask as [rows, 1], and not as [rows]?

    Found out on two rows and two experts; nothing is compiled for it. One that counts right with neither is
    left as it is, with a WARNING.
    """
    mask = torch.tensor([True, False], device="cpu")
    # Where dynamo isn't imported nothing is compiled, and this doesn't import it.
    compiles = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext():
        if _counts_second_row(native, mask):
            return False
        column = _counts_second_row(native, mask.unsqueeze(-1))
    if not column:
        logger.warning(
            "[npu_replay] %s doesn't leave padding out of the counts for the expert bias, and how to mend it "
            "isn't known; it is left as it is",
            described(native),
        )
    return column


def _counts_second_row(native: Callable[..., None], mask: torch.Tensor) -> bool:
    both_to_the_first = torch.tensor([[True, False], [True, False]], device="cpu")
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2, device="cpu"))
    try:
        with torch.enable_grad():
            native(router, both_to_the_first, padding_mask=mask)
    except Exception:  # noqa: BLE001  whatever it raises, it isn't right
        return False
    return bool(router.local_tokens_per_expert.tolist() == [1, 0])
