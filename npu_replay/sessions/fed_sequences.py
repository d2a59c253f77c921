"""Find the sequences of one call of a Hugging Face model, their rows, and the routes that it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_replay.errors import MicroBatchError, listed, shown
from npu_replay.rollout.admit import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array, tells_apart
from npu_replay.routes.fingerprint import fingerprint, with_key
from npu_replay.routes.inputs import input_key, other_inputs
from npu_replay.routes.routed_experts import RoutedExperts

_IDS = ("input_ids", "tokens")
_OTHER_INPUTS = ("pixel_values", "image", "video", "audio", "input_features", "inputs_embeds")
"""Prefixes of arguments that influence the routing and that no token id shows."""
MODALITIES = ("video", "image", "audio")
"""The order in which an argument's name is tested for them."""
KEYWORDS = ("routed_experts", "rollout_expert_indices")
"""The keywords for a call's routes, of ms-swift and of SkyRL."""

_refuse_unless = MicroBatchError.unless


class Places(NamedTuple):
    """Describes the places of a call, [batch, sequence], batch-major."""

    real: Array  # bool, which hold tokens
    spans: list[tuple[int, int]]  # first place and end of each sequence, of one token too
    # Bool [places]: from here to the end of the row all ids are one padding id. A sequence that begins here
    # may be the padded end of a packed row, since positions count up there, too.
    padded: Array

    @classmethod
    def of(cls, call: Mapping[str, Any], padding: int = 0) -> Places:
        """Find the places of a call with these arguments, padded (with 0 or `padding`) or packed."""
        fed = [call[name] for name in (*_IDS, "inputs_embeds") if isinstance(call.get(name), torch.Tensor)]
        known, wanted = bool(fed) and not fed[0].is_nested and fed[0].dim() >= 2, " or ".join(_IDS)
        _refuse_unless(known, "this call has no token ids", f"{wanted}, [batch, sequence]", sorted(call))
        real = _real(call.get("attention_mask"), tuple(fed[0].shape[:2]))
        begins = real & ~_before(real)
        positions = call.get("position_ids")
        kinds = len(positions) if isinstance(positions, torch.Tensor) and positions.dim() == 3 else 1
        if kinds == 3 and any(name.startswith(_OTHER_INPUTS) for name in call):
            positions = None  # time, height and width of images, without the positions of the text
        bounds = call.get("cu_seq_lens_q", call.get("cu_seqlens"))
        if positions is not None:  # a sequence begins at each 0
            numbers = _array(positions)
            numbers = np.broadcast_to(numbers[0] if numbers.ndim == 3 else numbers, real.shape)
            starts = real & (numbers == 0)
            goes_on = ~real | starts | (numbers == _before(numbers) + 1)
            fine, problem = (~begins | starts) & goes_on, "these position_ids are of a part of a sequence"
            expected, got = "positions from 0 in each sequence", numbers[real].tolist()[:20]
            cause = "sequence or context parallelism, which gives each rank a part; or positions that count "
            _refuse_unless(bool(fine.all()), problem, expected, got, f"{cause}padding")
            begins = starts
        elif bounds is not None:
            bounds = _array(bounds)
            problem, expected = "the cumulative lengths exceed the call's tokens", f"at most {real.size}"
            cause = "sequence or context parallelism: each rank has a part of the tokens, and all lengths"
            _refuse_unless(bounds[-1] <= real.size, problem, expected, int(bounds[-1]), cause)
            # Behind the last sequence is the padded end of a packed stream.
            real = real & (np.arange(real.size) < bounds[-1]).reshape(real.shape)
            begins = real & ~_before(real)
            begins.reshape(-1)[bounds[:-1][bounds[:-1] < begins.size]] = True
        first = begins.reshape(-1).nonzero()[0]
        stops = np.append((begins | ~real).reshape(-1).nonzero()[0], real.size)
        end = stops[np.searchsorted(stops, first, side="right")]
        # Padding is never at the beginning of a row, nor behind what a mask leaves out.
        ids = _array(fed[0]) if fed[0].dim() == 2 else np.full(real.shape, np.nan)  # embeddings don't show it
        alike = real & (ids == ids[:, -1:]) & np.isin(ids, (0, padding))
        padded = _before(real) & np.logical_and.accumulate(alike[:, ::-1], axis=1)[:, ::-1]
        return cls(real, list(zip(first.tolist(), end.tolist(), strict=True)), padded.reshape(-1))


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
    ids: Any = next((call[name] for name in _IDS if name in call), None)
    embedded = [name for name in call if "embeds" in name]
    told = isinstance(ids, torch.Tensor) and not ids.is_nested and ids.dim() == 2 and not embedded
    problem, expected = "routes are found by token ids, which this call lacks", "input_ids, [batch, sequence]"
    cause = "embeddings in the place of ids or of images, which change with the weights"
    _refuse_unless(told, problem, expected, ", ".join(embedded or sorted(call)), cause)
    (real, spans, padded), flat = Places.of(call, placeholders.get("padding", 0)), _array(ids).reshape(-1)
    if keys is None:
        keys = _input_keys(other_inputs(call, ids), flat, spans, placeholders)
    keys, problem = listed(keys, "sample_key"), "another number of sample keys than sequences"
    keyed = [n for n, (first, _) in enumerate(spans) if len(keys) == len(spans) or not padded[first]]
    _refuse_unless(len(keys) == len(keyed), problem, len(keyed), len(keys))
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
        kind = next((one for one in MODALITIES if one in name.replace("pixel", "image")), "audio")
        # A sequence has one row for each run of its placeholders (an image, a clip), or a share of the rows
        # like its share of the placeholders (patches). Rows that can't be assigned so belong to all.
        here = flat == special.get(kind, -1)
        begins = here & ~np.append(False, here[:-1])
        counted = begins if begins.sum() == len(rows) else here
        of, bounds = counted.sum(), np.array(spans, dtype=np.int64).reshape(-1, 2)
        shares = np.append(0, np.cumsum(counted))[bounds] * len(rows)
        is_told = bool(of) and not (shares % of).any()
        for number, found in enumerate(own):
            a, b = (shares[number] // of).tolist() if is_told else (0, len(rows))
            if a < b:
                found[name if is_told else f"{name} for sequence {number}"] = rows[a:b]
    return [input_key(found) for found in own]


def _array(tensor: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    host = tensor.detach().cpu()
    return np.asarray(host.float() if host.is_floating_point() else host)  # numpy has no bfloat16


def _before(values: Array) -> Array:
    """Return for each place of [batch, sequence] the value of the place before it; 0 for the first."""
    return np.pad(values, ((0, 0), (1, 0)))[:, :-1]


def _real(mask: Any, shape: tuple[int, ...]) -> Array:
    """Return bool [batch, sequence]: which places hold tokens."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    alike = isinstance(mask, torch.Tensor) and mask.shape == shape
    flags = _array(mask) if alike else np.full(1, -1)
    problem, expected = "this attention_mask doesn't tell which places are padding", f"0 and 1, {list(shape)}"
    got = "other numbers" if alike else list(getattr(mask, "shape", [])) or type(mask).__name__
    cause = "a mask of four dimensions, of sequence numbers (packing), or a dict of several"
    _refuse_unless(bool(((flags == 0) | (flags == 1)).all()), problem, expected, got, cause)
    real: Array = flags != 0
    runs = (real & ~_before(real)).sum(axis=1)
    got = f"{int(runs.max(initial=0))} in row {int(runs.argmax()) if len(runs) else 0}"
    cause = "tokens that are masked out between others (tool answers, say): mask them in the loss instead"
    problem, expected = "this attention_mask has holes", "one run of ones in each row"
    _refuse_unless(bool((runs <= 1).all()), problem, expected, got, cause)
    return real


def carried_routes(
    given: Any, call: Mapping[str, Any], model: RoutedModel, padding: int = 0
) -> RoutedExperts:
    """Return the routes of a call, one row for each place of its [batch, sequence], batch-major.

    Such loops pad with zeros (or -1, or consecutive ids), so these in all MoE layers mean a token without a
    route; only padding and the last token of a sequence may have none. With a top-k of 1 and few layers,
    zeros at any other token are expert 0.

    Args:
        given: [batch, sequence, layers, topk], padded or packed like the call's ids; layers are all decoder
            layers or the MoE layers.

    Raises:
        ReplayError: another shape; a route at padding, or none at a token; ids that aren't the model's.
    """
    real, spans, padded = Places.of(call, padding)
    try:
        rows = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "integers, [batch, sequence, layers, topk]"
        cause = "an engine's answer as text, or a list of samples of several lengths: pad them as the ids"
        problem, got = "the call's routes are no tensor", shown(given)
        raise MicroBatchError(problem, expected=expected, got=got, cause=cause) from error
    fits = rows.dim() == 4 and (*rows.shape[:2], rows.shape[3]) == (*real.shape, model.topk)
    problem = "the call's routes have another shape than its ids"
    expected = f"integers, {list(real.shape)} as the ids, layers, {model.topk}"
    got = f"{str(rows.dtype).removeprefix('torch.')}, {list(rows.shape)}"
    cause = "routes that were padded, cut or packed otherwise than the ids; sequence parallelism"
    _refuse_unless(fits and not rows.is_floating_point(), problem, expected, got, cause)
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
        got = f"row {at // width} of the batch, place {at % width}, and {int(wrong.sum()) - 1} more"
        _refuse_unless(at < 0, problem, "a route for each token, and none for padding", got, cause)
    return routes
