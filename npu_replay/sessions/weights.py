"""Tells whether a model's weights have changed since a rollout engine made its routes with them."""

from __future__ import annotations

import time
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.routes.inputs import digest

_Digests = list[tuple[torch.Size, int]]
_PARAMETERS = 4


class _Seen(NamedTuple):
    digests: _Digests  # of a few parameters, with the weights of a rollout
    at: float  # when a forward with these weights was last judged


_seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def weights_moved(module: nn.Module, made_at: float, *, grad: bool) -> bool:
    """Return whether an update lies between a rollout and this forward, which replays its routes.

    A forward without grad takes old log-probs, with the weights that the rollout engine had. Routes that were
    made after the forward that was judged last are of a new rollout, whose engine has the weights of now.

    Args:
        made_at: `RoutedExperts.made_at` of the routes.
        grad: whether the forward has a graph.
    """
    now = _digests(module)
    before = _seen.get(module)
    if before is None or not grad or not _differ(before.digests, now) or made_at > before.at:
        _seen[module] = _Seen(now, time.time())
        return False
    return True


def _differ(before: _Digests, now: _Digests) -> bool:
    # A sharded model has whole parameters at one time and parts at another, which can't be compared.
    alike = (pair for pair in zip(before, now, strict=False) if pair[0][0] == pair[1][0])
    return any(ours != theirs for ours, theirs in alike)


def _digests(module: nn.Module) -> _Digests:
    """Return shape and digest of a few parameters, since optimizers write past version counters."""
    parameters = list(module.parameters())
    trained = [one for one in parameters if one.requires_grad] or parameters
    places = sorted({round(at * (len(trained) - 1) / (_PARAMETERS - 1)) for at in range(_PARAMETERS)})
    looked = [trained[at].detach() for at in places] if trained else []
    local = [getattr(one, "_local_tensor", one) for one in looked]
    digests = [digest(one) for one in local]
    on_host = [int(one) for one in torch.stack([one.cpu() for one in digests])] if digests else []
    return [(one.shape, value) for one, value in zip(local, on_host, strict=True)]
