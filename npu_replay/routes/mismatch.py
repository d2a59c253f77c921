"""compare: measures how far two routings, or two sets of log-probs, are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch

from npu_replay.errors import InvalidRoutes, ReplayError, list_of
from npu_replay.routes.routed_experts import RoutedExperts

Routes: TypeAlias = "RoutedExperts | Sequence[RoutedExperts]"
_LOG_PROBS = (
    "log-probs that aren't one tensor on each side: torch.cat those of the micro-batches, torch.as_tensor of "
    "an array"
)


@dataclass(frozen=True)
class RoutingDifference:
    """Compares two routings of the same tokens.

    Attributes:
        router_mismatch: share of token-layers whose sets of experts differ (order doesn't count). An expert
            that dropped the token over its capacity, as `record` or `observe` saw, is missing from its set.
        token_mismatch: share of tokens with a difference in some layer.
        layer_mismatch: router_mismatch of each layer, by label.
        token_layers: the number compared: rows recorded (or observed) on both sides, times layers.
        differing: the number of them that differ.
    """

    router_mismatch: float
    token_mismatch: float
    layer_mismatch: dict[int, float]
    token_layers: int
    differing: int


@dataclass(frozen=True)
class LogProbDifference:
    """Compares log-probs of the same tokens, `a` of the policy that sampled them and `b` of another.

    Attributes:
        kl: KL(a, b) by the k3 estimator, the mean of r - 1 - log r with r = exp(b - a) (J. Schulman,
            «Approximating KL Divergence», 2020), in nats per token.
        max_difference: largest |b - a|, in nats.
        mean_difference: mean |b - a|, in nats.
        ratio_min, ratio_mean, ratio_max: of r, the policy ratio if a is the old policy.
        tokens: the number compared.
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
        b: the same kind of value. Of routings, the layers that both have are compared.
        mask: for log-probs, bool, the tokens that count.

    >>> a = npu_replay.RoutedExperts(ids=np.array([[[0, 1]], [[2, 3]]]), layers=[0], num_experts=4)
    >>> b = npu_replay.RoutedExperts(ids=np.array([[[1, 0]], [[2, 1]]]), layers=[0], num_experts=4)
    >>> npu_replay.compare(a, b).router_mismatch
    0.5

    Raises:
        ReplayError: they can't be compared; the error says why.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _compare_log_probs(a, b, mask)
    ReplayError.unless(mask is None, "a mask goes with log-probs; routings say themselves which rows count")
    ours, theirs = (side if isinstance(side, RoutedExperts) else _joined(side) for side in (a, b))
    layers, both, differ = difference(ours, theirs)
    compared = both * len(layers)
    differing = int(differ.sum())
    by_layer = dict(zip(layers, (differ.sum(dim=0) / both).tolist(), strict=True))
    tokens = int(differ.any(dim=1).sum()) / both
    return RoutingDifference(differing / compared, tokens, by_layer, compared, differing)


def difference(a: RoutedExperts, b: RoutedExperts) -> tuple[list[int], int, torch.Tensor]:
    """Return the common layers, the number of rows known in both, and where the sets of experts differ there.

    The last is bool [tokens, layers]. Refuses routings without a common layer and row.
    """
    for what, ours, theirs in (
        ("tokens", len(a), len(b)),
        ("top-k", a.topk, b.topk),
        ("number of experts", a.num_experts, b.num_experts),
    ):
        InvalidRoutes.unless(ours == theirs, f"these routings differ in {what}", ours, theirs)
    layers = [layer for layer in a.layers if layer in b.layers]
    known = _known(a) & _known(b)
    both = int(known.sum())
    InvalidRoutes.unless(
        bool(layers) and both != 0,
        "these routings have nothing in common to compare",
        expected="a layer, and a row recorded in both",
        got=f"{len(layers)} common layers, {both} common rows",
    )
    differ = (_sets(a, layers) != _sets(b, layers)).any(dim=2) & known[:, None]
    return layers, both, differ


def _sets(routes: RoutedExperts, layers: list[int]) -> torch.Tensor:
    """Return the ids in these layers in one order, since engines and trainers have them in different ones."""
    ids = routes.ids if routes.shown is None else routes.shown
    return ids[:, [routes.layers.index(layer) for layer in layers]].sort(dim=2).values


def _known(routes: RoutedExperts) -> torch.Tensor:
    """Return the rows that can be compared, bool [tokens]."""
    return routes.recorded if routes.shown is None else torch.ones_like(routes.recorded)


def _joined(parts: Any) -> RoutedExperts:
    """Return the rows of all micro-batches, with what was seen dropped in some."""
    routings = list_of(parts, RoutedExperts, "routings", _LOG_PROBS)
    whole = RoutedExperts.concat(routings)
    if all(part.shown is None for part in routings):
        return whole
    shown = [part.ids.short() if part.shown is None else part.shown for part in routings]
    return whole.with_known(shown=torch.cat(shown))


def _compare_log_probs(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None) -> LogProbDifference:
    tensors: list[Any] = [a, b] if mask is None else [a, b, mask]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    ReplayError.unless(len(shapes) == 1, "the log-probs have different shapes", tuple(a.shape), shapes)
    chosen = torch.ones_like(a, dtype=torch.bool) if mask is None else mask.bool()
    # In double: log-probs that differ by 1e-7 would lose that in the exponential of a float32.
    ours, theirs = (x.detach()[chosen].double().cpu() for x in (a, b))
    ReplayError.unless(ours.numel() > 0, "there is no token to compare", ">= 1", 0)
    ReplayError.unless(
        bool(torch.isfinite(ours).all() & torch.isfinite(theirs).all()),
        "there are log-probs that aren't finite",
        cause="a token with probability 0, or NaN",
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
