"""Tells whether a model's weights have changed since a rollout engine made its routes with them."""

from __future__ import annotations

import time
import weakref
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.routes.host_copies import HostCopy
from npu_replay.routes.inputs import digest

_Digests = list[tuple[torch.Size, int]]
_PARAMETERS = 4


class _Seen(NamedTuple):
    looked_at: list[weakref.ref[torch.Tensor]]  # a few parameters
    digests: _Digests  # theirs, with the weights of a rollout
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
    before = _seen.get(module)
    looked_at = [] if before is None else [parameter() for parameter in before.looked_at]
    parameters = [parameter for parameter in looked_at if parameter is not None and not parameter.is_meta]
    if before is None or len(parameters) < len(looked_at):
        parameters = _some_parameters(module)
    now = _digests(parameters)
    if before is None or not grad or not _differ(before.digests, now) or made_at > before.at:
        _seen[module] = _Seen([*map(weakref.ref, parameters)], now, time.time())
        return False
    return True


def _differ(before: _Digests, now: _Digests) -> bool:
    # A sharded model has whole parameters at one time and parts at another, which can't be compared.
    alike = (pair for pair in zip(before, now, strict=False) if pair[0][0] == pair[1][0])
    return any(ours != theirs for ours, theirs in alike)


def _some_parameters(module: nn.Module) -> list[torch.Tensor]:
    """Return a few parameters of a model, trained ones if there are any; none that is offloaded for now."""
    parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]
    trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    places = sorted({round(at * (len(trained) - 1) / (_PARAMETERS - 1)) for at in range(_PARAMETERS)})
    return [trained[at] for at in places] if trained else []


def _digests(parameters: list[torch.Tensor]) -> _Digests:
    """Return shape and digest of each, since optimizers write past version counters."""
    local = [_here(parameter) for parameter in parameters]
    on_host = HostCopy([digest(parameter) for parameter in local]).read()
    return [(parameter.shape, int(value)) for parameter, value in zip(local, on_host, strict=True)]


def _here(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter: FSDP2's part, or that of DeepSpeed's ZeRO-3."""
    if (part := getattr(parameter, "ds_tensor", None)) is not None:  # also while the whole is gathered
        return part  # type: ignore[no-any-return]
    whole = parameter.detach()
    return getattr(whole, "_local_tensor", whole)
