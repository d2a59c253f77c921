"""Find the sequences of one call of a Hugging Face model, their rows, and the routes that it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_replay.errors import MicroBatchError
from npu_replay.rollout.admit import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.arguments import as_tensor
from npu_replay.routes.checks import Array, tells_apart
from npu_replay.routes.fingerprint import fingerprint, with_key
from npu_replay.routes.inputs import input_key, other_inputs
from npu_replay.routes.places import IDS, Places, on_host
from npu_replay.routes.routed_experts import RoutedExperts

MODALITIES = ("video", "image", "audio")
"""The order in which an argument's name is tested for them."""
KEYWORDS = ("routed_experts", "rollout_expert_indices")
"""The keywords for a call's routes, of ms-swift and of SkyRL."""

_refuse_unless = MicroBatchError.unless


class FedSequences(NamedTuple):
    """Holds the sequences of one call, in rows of [batch, sequence], batch-major.

    A sequence of one token has no prediction, and is often the padding of a packed stream: it is left out.
    """

    rows: int  # of padding, too
    spans: list[tuple[int, int]]  # first row and end of each sequence
    marks: list[int]  # the fingerprint of each, with its key
    of_tokens: list[int]  # the fingerprint without the key
    padded: list[bool]  # it may be the padded end of a packed row; see Places


def fed_sequences(call: Mapping[str, Any], placeholders: Mapping[str, int], keys: Any = None) -> FedSequences:
    """Find the sequences of a call with these arguments; raise MicroBatchError if they can't be told.

    Args:
        call: its arguments by name.
        placeholders: the token ids that stand for MODALITIES of the model, and for "padding".
        keys: the caller's own, one a sequence; a padded end needs none. Without them, images, videos and
            audio of a sequence are its key.
    """
    ids: Any = next((call[name] for name in IDS if name in call), None)
    embedded = [name for name in call if "embeds" in name]
    _refuse_unless(
        isinstance(ids, torch.Tensor) and not ids.is_nested and ids.dim() == 2 and not embedded,
        "routes are found by token ids, which this call lacks",
        expected="input_ids, [batch, sequence]",
        got=", ".join(embedded or sorted(call)),
        cause="embeddings in the place of ids or of images, which change with the weights",
    )
    real, spans, padded = Places.of(call, placeholders.get("padding", 0))
    flat = on_host(ids).reshape(-1)
    if keys is None:
        keys = _input_keys(other_inputs(call, ids), flat, spans, placeholders)
    keys = [keys] if isinstance(keys, str) else list(keys)
    keyed = [n for n, (first, _) in enumerate(spans) if len(keys) == len(spans) or not padded[first]]
    _refuse_unless(
        len(keys) == len(keyed), "another number of sample keys than sequences", len(keyed), len(keys)
    )
    key_of = dict(zip(keyed, keys, strict=True))
    long = [n for n, (first, end) in enumerate(spans) if end - first > 1]
    spans = [spans[n] for n in long]
    of_tokens = [fingerprint(flat[a:b]) for a, b in spans]
    marks = [with_key(mark, key_of.get(n)) for mark, n in zip(of_tokens, long, strict=True)]
    return FedSequences(real.size, spans, marks, of_tokens, [bool(padded[a]) for a, _ in spans])


def _input_keys(
    others: Mapping[str, torch.Tensor], flat: Array, spans: list[tuple[int, int]], special: Mapping[str, int]
) -> list[str | None]:
    """Return the key of each sequence by its own rows of the other inputs; None for a text."""
    own: list[dict[str, torch.Tensor]] = [{} for _ in spans]
    for name, tensor in others.items():
        rows = tensor if tensor.dim() else tensor[None]
        kind = next(
            (modality for modality in MODALITIES if modality in name.replace("pixel", "image")), "audio"
        )
        # A sequence has one row for each run of its placeholders (an image, a clip), or a share of the rows
        # like its share of the placeholders (patches). Rows that can't be assigned so belong to all.
        here = flat == special.get(kind, -1)
        begins = here & ~np.append(False, here[:-1])
        counted = begins if begins.sum() == len(rows) else here
        of = counted.sum()
        bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
        shares = np.append(0, np.cumsum(counted))[bounds] * len(rows)
        is_told = bool(of) and not (shares % of).any()
        for number, inputs in enumerate(own):
            a, b = (shares[number] // of).tolist() if is_told else (0, len(rows))
            if a < b:
                inputs[name if is_told else f"{name} for sequence {number}"] = rows[a:b]
    return [input_key(inputs) for inputs in own]


def carried_routes(
    carried: Any, call: Mapping[str, Any], model: RoutedModel, padding: int = 0
) -> RoutedExperts:
    """Return the routes of a call, one row for each place of its [batch, sequence], batch-major.

    Such loops pad with zeros (or -1, or consecutive ids), so these in all MoE layers mean a token without a
    route; only padding and the last token of a sequence may have none. With a top-k of 1 and few layers,
    zeros at any other token are expert 0.

    Args:
        carried: [batch, sequence, layers, topk], padded or packed like the call's ids; layers are all decoder
            layers or the MoE layers.

    Raises:
        ReplayError: another shape; a route at padding, or none at a token; ids that aren't the model's.
    """
    real, spans, padded = Places.of(call, padding)
    rows = as_tensor(carried).detach()
    fits = rows.dim() == 4 and (*rows.shape[:2], rows.shape[3]) == (*real.shape, model.topk)
    _refuse_unless(
        fits and not rows.is_floating_point(),
        "the call's routes have another shape than its ids",
        expected=f"integers, {list(real.shape)} as the ids, layers, {model.topk}",
        got=f"{str(rows.dtype).removeprefix('torch.')}, {list(rows.shape)}",
        cause="routes that were padded, cut or packed otherwise than the ids; sequence parallelism",
    )
    width, real = real.shape[1], real.reshape(-1)
    lacking: Array = ~real  # padding, and the last token of each sequence
    for first, end in spans:
        lacking[first if padded[first] else end - 1 : end] = True
    rows, fed, tokens = rows.flatten(0, 1), call.get("input_ids"), None
    if isinstance(fed, torch.Tensor) and fed.numel() == len(rows):
        tokens = fed.detach().cpu().reshape(-1).numpy()
    # Elsewhere zeros may be a route: expert 0 in all layers.
    none = model.topk > 1 or tells_apart(len(model.layers), model.num_experts, model.topk) or lacking
    routes = from_batch(rows, model, zeros_are_none=none, tokens=tokens)
    there = routes.recorded.numpy()
    moved = "routes of another text, cut, or moved by one: a last token without a route, padded on the left"
    other_side = "ids padded on the other side than their routes, or another mask"
    for wrong, problem, cause in (
        (there & ~real, "padding has a route", other_side),
        (~there & ~lacking, "a token has no route, and isn't the last of its sequence", moved),
    ):
        at = int(wrong.argmax()) if wrong.any() else -1
        _refuse_unless(
            at < 0,
            problem,
            expected="a route for each token, and none for padding",
            got=f"row {at // width} of the batch, place {at % width}, and {int(wrong.sum()) - 1} more",
            cause=cause,
        )
    return routes
