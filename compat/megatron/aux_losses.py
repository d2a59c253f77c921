"""Sets which experts a Megatron router's aux losses count while the router is given its experts.

Megatron-core 0.12 counts the experts of the routing itself, that is the replayed ones. From 0.13 on a second
top-k counts the live choice. npu_replay makes all releases alike: live, or replayed where asked for. The
expert bias counts the experts that tokens were sent to, the replayed ones, on every release.

Asks:     which methods the router's class has, what its own count goes by, and whose its routing is.
Changes:  one argument of these methods, which are bound on the router's instance for the length of a block.
Undone:   by `remove`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.routers import AuxLosses, Ids

logger = logging.getLogger(__name__)

_BY_PARTIAL = "apply_load_balancing_loss"
"""The method of 0.12 and 0.13, which gets the loss as a partial that holds the counts."""
_BY_ARGUMENT = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""The methods of later releases, which get the map: (probs, scores, routing_map, ...)."""
_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def of(router: Any) -> AuxLosses | None:
    """Return the aux losses of a TopKRouter; None where its config has none that is known."""
    config = router.config
    kind = type(router)
    names = _listed(config.moe_router_load_balancing_type)
    coefficients = _listed(config.moe_aux_loss_coeff)
    by_partial = hasattr(kind, _BY_PARTIAL)
    methods = (_BY_PARTIAL,) if by_partial else tuple(name for name in _BY_ARGUMENT if hasattr(kind, name))
    if not methods or not any(coefficients) or not any(name in _TYPES for name in names):
        return None
    # They count the routing itself, unless (from 0.13 on) the method of the scores has a top-k of its own.
    scores = getattr(kind, "compute_routing_scores_for_aux_loss", None)
    follow = by_partial and (scores is None or "scatter" not in inspect.unwrap(scores).__code__.co_names)
    known = by_partial or not _may_share_its_map(router)
    return AuxLosses(follow=follow if known else None, recount=functools.partial(_Recounted, router, methods))


def _may_share_its_map(router: Any) -> bool:
    """Return whether the routing may give its own map to the losses, in the place of a second top-k's.

    Megatron's routing never does. MindSpeed's moe_router_score_reuse does where both would choose alike by
    themselves: over a softmax, without groups and bias. Only there the losses count its own choice.
    """
    config = router.config
    if router.score_function != "softmax" or not config.moe_router_pre_softmax:
        return False
    if config.moe_router_group_topk or getattr(router, "expert_bias", None) is not None:
        return False
    defined_in = getattr(type(router).routing, "__globals__", {}).get("__name__", "")
    return not str(defined_in).startswith("megatron.")


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class _Recounted:
    """Binds methods of one router until they are removed; a copy of the router isn't affected."""

    def __init__(self, router: Any, names: tuple[str, ...], ids: Ids) -> None:
        self._router = router
        self._ids: Ids | None = ids
        self._before = {name: vars(router).get(name) for name in names}
        for name in names:
            setattr(router, name, types.MethodType(_counted(router, name, self), router))

    def ids(self, router: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the ids to count and the ids in use for a router's call; None leaves it alone."""
        return self._ids() if self._ids is not None and router is self._router else None

    def remove(self) -> None:
        for name, before in self._before.items():
            if before is None:
                vars(self._router).pop(name, None)
            else:
                setattr(self._router, name, before)
        self._router = self._ids = None  # a copy may still have the methods


def _counted(router: Any, name: str, recount: _Recounted) -> Callable[..., Any]:
    """Return a router's method, as a function of the router that is called, with other ids counted."""
    method = bound = getattr(router, name)
    if isinstance(bound, types.MethodType) and bound.__self__ is router:
        method = bound.__func__  # a copy of the router may be the one that is called
    else:
        method = functools.wraps(bound)(lambda _, *args, **kwargs: bound(*args, **kwargs))

    @functools.wraps(method)
    def in_partial(self: Any, activation: torch.Tensor, load_balancing_loss_func: Any) -> Any:
        loss = recounted(load_balancing_loss_func, recount.ids(self))
        return method(self, activation=activation, load_balancing_loss_func=loss)

    @functools.wraps(method)
    def in_arguments(self: Any, probs: Any, scores: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        asked = recount.ids(self)
        if asked is not None:
            padding = ~routing_map.any(dim=1, keepdim=True)  # rows that a padding_mask removed
            routing_map = _map(asked[0], routing_map).masked_fill(padding, 0)
        return method(self, probs, scores, routing_map, *args, **kwargs)

    return in_partial if name == _BY_PARTIAL else in_arguments


def recounted(loss: Any, ids: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    """Return an aux loss of Megatron 0.12 or 0.13, a partial, with other ids counted in it.

    >>> from npu_replay.compat.megatron.aux_losses import recounted
    >>> loss = functools.partial(print, tokens_per_expert=torch.tensor([2, 0, 0]))
    >>> ids = torch.tensor([[1], [2]])
    >>> recounted(loss, (ids, ids)).keywords
    {'tokens_per_expert': tensor([0, 1, 1])}

    Args:
        loss: has tokens_per_expert, or routing_map (0.12's is that after the drop by capacity), by keyword.
        ids: the ids to count and the ids in use; None leaves the loss as it is.
    """
    if ids is None:
        return loss
    chosen, used = ids
    known = loss.keywords if isinstance(loss, functools.partial) else {}
    if "routing_map" in known:
        wanted = _map(chosen, known["routing_map"])
        if chosen is not used:  # rows with equal ids keep what 0.12 dropped by capacity
            moved = (wanted != _map(used, wanted)).any(dim=1, keepdim=True)
            wanted = torch.where(moved, wanted, known["routing_map"])
        known = known | {"routing_map": wanted}
    elif "tokens_per_expert" in known:
        like = known["tokens_per_expert"]
        flat = chosen.flatten()
        counts = torch.zeros_like(like).index_add(0, flat, torch.ones_like(flat, dtype=like.dtype))
        known = known | {"tokens_per_expert": counts}
    else:
        _say_unknown(loss)
        return loss
    return functools.partial(loss.func, *loss.args, **known)


def _map(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).scatter(1, ids, 1)


@functools.cache
def _say_unknown(loss: object) -> None:
    logger.warning(
        "[npu_replay] the aux loss %r isn't one of Megatron's, and counts replayed experts or "
        "live ones; aux_loss='replayed', or NPU_REPLAY_AUX_LOSS=replayed, asks for no change",
        loss,
    )
