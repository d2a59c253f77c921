"""Routes that a loop hands to the model's call, as a keyword that no model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_replay.errors import MicroBatchError, shown
from npu_replay.rollout.admit import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array, tells_apart
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.fed_sequences import Places

KEYWORDS = ("routed_experts", "rollout_expert_indices")
"""ms-swift's name, and SkyRL's."""

_refuse_unless = MicroBatchError.unless


def take_off(kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The routes among a call's keywords, None without any, and the other keywords."""
    others = {name: value for name, value in kwargs.items() if name not in KEYWORDS}
    given = [kwargs[name] for name in KEYWORDS if kwargs.get(name) is not None]
    _refuse_unless(len(given) < 2, "a call carries its routes twice", "one of them", " and ".join(KEYWORDS))
    return (given[0] if given else None), others


def carried_routes(
    given: Any, call: Mapping[str, Any], model: RoutedModel, padding: int = 0
) -> RoutedExperts:
    """Those of a call with these arguments, one row a place of its [batch, sequence], batch-major.

    Zeros in all MoE layers (or -1) are a token without a route: what such loops pad with. Only padding and
    the last token of a sequence may be so. With a top-k of 1 and few layers, zeros at any other token are
    expert 0.

    Args:
        given: [batch, sequence, layers, topk], padded or packed like the call's ids; layers are all decoder
            layers or the MoE layers.
        padding: see Places.

    Raises:
        ReplayError: another shape; routes where there is padding, or none where there is a token; ids that
            aren't the model's.
    """
    places = Places.of(call, padding)
    rows = _tensor(given).detach()
    fits = rows.dim() == 4 and (*rows.shape[:2], rows.shape[3]) == (*places.real.shape, model.topk)
    _refuse_unless(
        fits and not rows.is_floating_point(),
        "the call's routes have another shape than its ids",
        f"integers, {list(places.real.shape)} as the ids, layers, {model.topk}",
        f"{str(rows.dtype).removeprefix('torch.')}, {list(rows.shape)}",
        "routes that were padded, cut or packed otherwise than the ids; sequence parallelism",
    )
    rows, lacking, fed, tokens = rows.flatten(0, 1), _may_lack(places), call.get("input_ids"), None
    if isinstance(fed, torch.Tensor) and fed.numel() == len(rows):
        tokens = fed.detach().cpu().reshape(-1).numpy()
    # Elsewhere zeros may be a route: expert 0 in all layers.
    none = model.topk > 1 or tells_apart(len(model.layers), model.num_experts, model.topk) or lacking
    routes = from_batch(rows, model, zeros_are_none=none, tokens=tokens)
    _check_places(routes.recorded.numpy(), places, lacking)
    return routes


def _tensor(given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MicroBatchError(
            "the call's routes are no tensor",
            expected="integers, [batch, sequence, layers, topk]",
            got=shown(given),
            cause="an engine's answer as text, or a list of samples of several lengths: pad them as the ids",
        ) from error


def _check_places(there: Array, places: Places, lacking: Array) -> None:
    """Has each token a route, the last of a sequence perhaps not, and no padding?"""
    real = places.real.reshape(-1)
    width = places.real.shape[1]
    for wrong, problem, cause in (
        (
            there & ~real,
            "padding has a route",
            "ids padded on the other side than their routes, or another mask",
        ),
        (
            ~there & ~lacking,
            "a token has no route, and isn't the last of its sequence",
            "routes of another text, cut, or moved by one: a last token without a route, padded on the left",
        ),
    ):
        at = int(wrong.argmax()) if wrong.any() else -1
        got = f"row {at // width} of the batch, place {at % width}, and {int(wrong.sum()) - 1} more"
        _refuse_unless(at < 0, problem, "a route for each token, and none for padding", got, cause)


def _may_lack(places: Places) -> Array:
    """Bool [rows]: where no route need be: padding, and the last token of each sequence."""
    found: Array = ~places.real.reshape(-1)
    for first, end in places.spans:
        found[first if places.padded[first] else end - 1 : end] = True
    return found
