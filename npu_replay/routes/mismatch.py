"""compare: how far two routings, or two sets of log-probs, are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch

from npu_replay.errors import InvalidRoutes, ReplayError, shown
from npu_replay.routes.routed_experts import RoutedExperts, is_plain

Routes: TypeAlias = "RoutedExperts | Sequence[RoutedExperts]"


@dataclass(frozen=True)
class RoutingDifference:
    """Two routings of the same tokens.

    Attributes:
        router_mismatch: share of token-layers whose sets of experts differ (order doesn't count).
        token_mismatch: share of tokens with a difference in some layer.
        layer_mismatch: router_mismatch of each layer, by label.
        token_layers: how many were compared: rows recorded on both sides, times layers.
        differing: how many of them differ.
    """

    router_mismatch: float
    token_mismatch: float
    layer_mismatch: dict[int, float]
    token_layers: int
    differing: int


@dataclass(frozen=True)
class LogProbDifference:
    """Log-probs of the same tokens, `a` of the policy that sampled them and `b` of another.

    Attributes:
        kl: KL(a, b) by the k3 estimator, the mean of r - 1 - log r with r = exp(b - a) (J. Schulman,
            «Approximating KL Divergence», 2020), in nats a token.
        max_difference: largest |b - a|, in nats.
        mean_difference: mean |b - a|, in nats.
        ratio_min, ratio_mean, ratio_max: of r, the policy ratio if a is the old policy.
        tokens: how many were compared.
    """

    kl: float
    max_difference: float
    mean_difference: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    tokens: int


@overload
def compare(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None = None) -> LogProbDifference: ...


@overload
def compare(a: Routes, b: Routes) -> RoutingDifference: ...


def compare(
    a: Routes | torch.Tensor, b: Routes | torch.Tensor, mask: torch.Tensor | None = None
) -> RoutingDifference | LogProbDifference:
    """Compare two routings, or two tensors of log-probs of the same sampled tokens.

    Args:
        a: RoutedExperts, a list of them (micro-batches), or log-probs of any shape, in nats.
        b: the same kind of thing. Of routings, the layers that both have are compared.
        mask: for log-probs, bool, the tokens that count.

    Raises:
        ReplayError: they can't be compared; says why.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _compare_log_probs(a, b, mask)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        raise ReplayError(
            "compare() got two different kinds of things",
            expected="two routings, or two tensors of log-probs",
            got=f"{type(a).__name__} and {type(b).__name__}",
        )
    if mask is not None:
        raise ReplayError("a mask goes with log-probs; routings say themselves which rows count")
    return _compare_routings(_joined(a), _joined(b))


def differing_token_layers(a: RoutedExperts, b: RoutedExperts) -> torch.Tensor:
    """Bool [tokens, layers]: where the sets of experts differ, among rows recorded on both sides."""
    layers = [layer for layer in a.layers if layer in b.layers]
    ours = a.ids[:, [a.layers.index(layer) for layer in layers]].sort(dim=2).values
    theirs = b.ids[:, [b.layers.index(layer) for layer in layers]].sort(dim=2).values
    return (ours != theirs).any(dim=2) & (a.recorded & b.recorded)[:, None]


def check_comparable(a: RoutedExperts, b: RoutedExperts) -> None:
    """Refuse two routings that aren't of the same tokens and experts, or have nothing in common.

    Raises:
        InvalidRoutes: in what they differ.
    """
    for what, ours, theirs in (
        ("tokens", len(a), len(b)),
        ("top-k", a.topk, b.topk),
        ("number of experts", a.num_experts, b.num_experts),
    ):
        if ours != theirs:
            raise InvalidRoutes(
                f"these routings differ in {what}",
                expected=ours,
                got=theirs,
                cause="routes of two models, or of two sequences",
            )
    layers, both = set(a.layers) & set(b.layers), int((a.recorded & b.recorded).sum())
    if not layers or not both:
        raise InvalidRoutes(
            "these routings have nothing in common to compare",
            expected="a layer that both have, and a row recorded in both",
            got=f"{len(layers)} common layers, {both} common rows",
            cause="routes of two models, or of two sequences",
        )


def _compare_routings(a: RoutedExperts, b: RoutedExperts) -> RoutingDifference:
    check_comparable(a, b)
    layers, both = [layer for layer in a.layers if layer in b.layers], int((a.recorded & b.recorded).sum())
    differ = differing_token_layers(a, b)
    by_layer = (differ.sum(dim=0) / both).tolist()
    return RoutingDifference(
        router_mismatch=int(differ.sum()) / (both * len(layers)),
        token_mismatch=int(differ.any(dim=1).sum()) / both,
        layer_mismatch=dict(zip(layers, by_layer, strict=True)),
        token_layers=both * len(layers),
        differing=int(differ.sum()),
    )


def _compare_log_probs(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None) -> LogProbDifference:
    given: tuple[Any, ...] = (a, b) if mask is None else (a, b, mask)
    for tensor in given:
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            raise ReplayError(
                "log-probs and their mask are plain tensors", expected="a torch.Tensor", got=shown(tensor)
            )
    shapes = {tuple(a.shape), tuple(b.shape)}
    if mask is not None:
        shapes.add(tuple(mask.shape))
    if len(shapes) != 1:
        raise ReplayError("the log-probs have different shapes", expected=tuple(a.shape), got=sorted(shapes))
    chosen = torch.ones_like(a, dtype=torch.bool) if mask is None else mask.bool()
    ours, theirs = (x.detach()[chosen].double().cpu() for x in (a, b))
    if not ours.numel():
        raise ReplayError("there is no token to compare", expected=">= 1", got=0)
    if not bool(torch.isfinite(ours).all() & torch.isfinite(theirs).all()):
        raise ReplayError(
            "there are log-probs that aren't finite", cause="a token with probability 0, or NaN"
        )
    log_ratio = theirs - ours
    ratio = log_ratio.exp()
    return LogProbDifference(
        kl=float((ratio - 1 - log_ratio).mean()),
        max_difference=float(log_ratio.abs().max()),
        mean_difference=float(log_ratio.abs().mean()),
        ratio_min=float(ratio.min()),
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        tokens=ours.numel(),
    )


def _joined(routes: Routes) -> RoutedExperts:
    return routes if isinstance(routes, RoutedExperts) else RoutedExperts.concat(routes)
