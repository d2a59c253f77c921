"""verl's route tensors as RoutedExperts, and back.

verl carries routes as [batch, sequence, layers, topk] with zeros where there is no token, or as a jagged
tensor of [tokens, layers, topk]. Which token sits in which row of a router is read off verl's own
preprocessing, by pushing token numbers through it: packing, alignment, context parallelism, whatever it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from npu_replay.compat.megatron import parallel_state
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.pipeline_layers import DecoderLayers
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.rollout.admit import check_dense
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype

_PACKERS = ("preprocess_thd_engine", "preprocess_thd_no_padding")
"""verl's packing of jagged batches, from 0.8 on and before."""


def layout_of(
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    config: Any,
    utils: Any,
    local_cp_size: int | None = None,
) -> TokenLayout:
    """The rows of this rank's routers for one micro-batch.

    Args:
        tokens: jagged [batch, tokens, ...], or padded [batch, sequence, ...] with a mask; its lengths count.
        attention_mask: [batch, sequence], of a padded batch.
        config: the model's TransformerConfig.
        utils: verl's module router_replay_utils, whose preprocessing is probed.
        local_cp_size: ranks that share this micro-batch under dynamic context parallelism.

    Raises:
        MicroBatchError: a padded batch without a mask, or preprocessing that can't be read.
    """
    pack = _packer(bool(tokens.is_nested), config, utils, local_cp_size)
    parallel = ParallelLayout.from_megatron(config)
    return TokenLayout.from_probe(pack, lengths_of(tokens, attention_mask), parallel=parallel)


def lengths_of(tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Tokens of each sequence."""
    if tokens.is_nested:
        return [int(size) for size in offsets(tokens).diff().tolist()]
    return [int(size) for size in _kept(attention_mask).sum(dim=1).tolist()]


def offsets(jagged: torch.Tensor) -> torch.Tensor:
    """Where each sequence of a jagged tensor begins, [batch + 1]."""
    return jagged.offsets()  # type: ignore[attr-defined, no-any-return]  # torch's stubs know no jagged tensors


def _kept(attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of a padded batch, bool, on the CPU."""
    if attention_mask is None:
        raise MicroBatchError(
            "a padded batch without an attention mask",
            expected="attention_mask [batch, sequence], or a jagged batch",
            got="None",
            cause="use_remove_padding=False, which router replay doesn't work with",
        )
    return attention_mask.detach().cpu().bool()


def _packer(
    jagged: bool, config: Any, utils: Any, local_cp_size: int | None
) -> Callable[[Any], torch.Tensor]:
    """verl's packing of token numbers, with the arguments that its own router replay gives it."""
    names = _PACKERS if jagged else ("preprocess_packed_seqs",)
    pack = next((getattr(utils, name) for name in names if hasattr(utils, name)), None)
    if pack is None:
        raise MicroBatchError(
            "this verl packs its batches otherwise",
            where=utils.__name__,
            expected=" or ".join(names),
            got="neither",
            cause="a release of verl that npu_replay doesn't know",
        )
    sparse = getattr(config, "experimental_attention_variant", None) == "dsv4_hybrid"
    wanted = {
        "use_fp8_padding": getattr(config, "fp8", None) in ("e4m3", "hybrid"),
        "cp_layout": "contiguous" if sparse else "zigzag",
        "min_local_rows": config.csa_window_size if sparse else None,
        "local_cp_size": local_cp_size,
    }
    known = inspect.signature(pack).parameters
    arguments = {name: value for name, value in wanted.items() if name in known}

    def packed(sequences: list[torch.Tensor]) -> torch.Tensor:
        if jagged:
            return pack(batched(sequences, jagged=True), pre_process=True, **arguments)[0]  # type: ignore[no-any-return]
        numbers = pad_sequence(sequences, batch_first=True)
        mask = pad_sequence([torch.ones_like(one, dtype=torch.bool) for one in sequences], batch_first=True)
        return pack(numbers, mask, pre_process=True, **arguments)[0]  # type: ignore[no-any-return]

    return packed


def sequences_of(
    routes: torch.Tensor,
    attention_mask: torch.Tensor | None,
    config: Any,
    *,
    mask: torch.Tensor | None = None,
    zeros_are_none: bool,
) -> list[RoutedExperts | ReplayError]:
    """One RoutedExperts a sequence, or why its routes can't be used.

    Args:
        routes: jagged [batch, tokens, layers, topk], or padded [batch, sequence, layers, topk].
        attention_mask: [batch, sequence], of padded routes.
        config: the model's TransformerConfig. The columns are all of its decoder layers, or the MoE layers.
        mask: jagged or [batch, tokens], the rows to replay; all when not given.
        zeros_are_none: a row of zeros in all layers is a token that the engine gave no route.

    Raises:
        MicroBatchError: columns that are neither, or another number of masks than sequences.
    """
    if routes.dim() != 4:
        raise MicroBatchError(
            "the routes have another shape than verl's",
            expected="[batch, tokens, layers, topk]",
            got=f"{routes.dim()} dimensions",
            cause="a rollout engine or an agent loop that hands on flat routes",
        )
    decoder = parallel_state.decoder_layers(config)
    columns = _columns(int(routes.shape[-2]), decoder)
    routes = routes.detach().cpu()
    each: Sequence[torch.Tensor] = (
        routes.unbind()
        if routes.is_nested
        else [one[kept] for one, kept in zip(routes, _kept(attention_mask), strict=True)]
    )
    masks = [None] * len(each) if mask is None else list(mask.unbind())
    if len(masks) != len(each):
        raise MicroBatchError("another number of masks than sequences", expected=len(each), got=len(masks))

    def checked(number: int, ids: torch.Tensor, keep: torch.Tensor | None) -> RoutedExperts | ReplayError:
        try:
            if isinstance(columns, list) and len(columns) < decoder.count:
                _check_dense(ids, decoder, config)
            return _sequence(ids[:, columns], decoder.moe, config, keep, zeros_are_none)
        except InvalidRoutes as error:
            return error.at(f"sample {number} of the micro-batch")

    return [checked(number, *one) for number, one in enumerate(zip(each, masks, strict=True))]


def _columns(count: int, decoder: DecoderLayers) -> slice | list[int]:
    """Which columns are the MoE layers."""
    if count == len(decoder.moe):
        return slice(None)
    if count == decoder.count:
        return list(decoder.moe)
    raise MicroBatchError(
        "the routes have another number of layers than the model",
        expected=f"{decoder.count} columns, one a decoder layer, or {len(decoder.moe)}, one a MoE layer",
        got=count,
        cause="an engine that counts multi-token prediction as a layer, or another model than the trainer's",
    )


def _check_dense(rows: torch.Tensor, decoder: DecoderLayers, config: Any) -> None:
    """An engine's labels may have shifted: then its dense layers have experts."""
    model = RoutedModel(
        layers=tuple(decoder.moe),
        num_layers=decoder.count,
        num_experts=int(config.num_moe_experts),
        topk=int(config.moe_router_topk),
    )
    check_dense(rows.to(torch.int64).numpy(), model)


def _sequence(
    here: torch.Tensor, labels: Sequence[int], config: Any, keep: torch.Tensor | None, zeros_are_none: bool
) -> RoutedExperts:
    if here.dtype == torch.uint16:
        here = here.to(torch.int64)
    recorded = torch.ones(len(here), dtype=torch.bool) if keep is None else keep.detach().cpu().bool()
    if zeros_are_none and here.numel():
        recorded = recorded & (here != 0).flatten(1).any(dim=1)
    built = RoutedExperts(ids=here, layers=labels, num_experts=int(config.num_moe_experts), recorded=recorded)
    return built.check_not_constant() if zeros_are_none else built


def laid_out(
    good: Mapping[int, Any], layout: TokenLayout, labels: Sequence[int], config: Any
) -> RoutedExperts:
    """The routes of these sequences in this rank's rows; those of all others take the routers' own choice."""
    topk, num_experts = int(config.moe_router_topk), int(config.num_moe_experts)
    return layout.rows_of(good, layers=labels, topk=topk, num_experts=num_experts)


def speaks_for_samples(parallel: ParallelLayout | None) -> bool:
    """Is this the rank of its replica that counts samples: the first of the first stage with MoE layers?"""
    if parallel is None or parallel.decoder is None:
        return True
    decoder, pp, vp = parallel.decoder, parallel.pp, parallel.vp
    stages = [
        {layer for stage in range(vp) for layer in decoder.stage(pp, vp, rank, stage)} for rank in range(pp)
    ]
    first = next(rank for rank, layers in enumerate(stages) if layers & set(decoder.moe))
    return (parallel.tp_rank, parallel.cp_rank, parallel.pp_rank) == (0, 0, first)


def blank(rows: int, labels: Sequence[int], config: Any) -> RoutedExperts:
    """Rows of which none has a route."""
    return RoutedExperts.unrecorded(
        rows, layers=labels, topk=int(config.moe_router_topk), num_experts=int(config.num_moe_experts)
    )


def wrong_length(rows: int, tokens: int, where: str = "") -> MicroBatchError | None:
    """What is wrong with so many rows for a sample; None for a row a token, or none for the last."""
    if rows in (tokens, tokens - 1):
        return None
    return MicroBatchError(
        "the routes have another number of tokens than the sample",
        where=where,
        expected=f"{tokens} (or {tokens - 1}: the last token has no route)",
        got=rows,
        cause="a response that was cut after the rollout, or routes of another sequence",
    )


def problems(
    found: Sequence[RoutedExperts | ReplayError], layout: TokenLayout, labels: Sequence[int]
) -> dict[int, ReplayError]:
    """The sequences whose routes can't be used, and why each can't."""
    usable = [one if isinstance(one, RoutedExperts) else None for one in found]
    bad = layout.bad_routes(usable, layers=labels)
    return {
        number: one if isinstance(one := found[number], ReplayError) else error
        for number, error in bad.items()
    }


def to_verl(
    found: Sequence[RoutedExperts],
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dtype: torch.dtype,
    topk: int = 0,
) -> torch.Tensor:
    """Sequences in the form of the batch that they belong to: jagged, or padded with zeros. Where none are
    given there are no layers, and `topk` alone is known: what a stage of dense layers has to say."""
    each = [one.ids.to(dtype) for one in found] or [
        torch.empty(size, 0, topk, dtype=dtype) for size in lengths_of(tokens, attention_mask)
    ]
    if tokens.is_nested:
        return batched(each, jagged=True)
    kept = _kept(attention_mask)
    out = torch.zeros(*kept.shape, *each[0].shape[1:], dtype=dtype)
    for row, ids in enumerate(each):
        out[row, kept[row]] = ids
    return out


def batched(samples: Sequence[torch.Tensor], *, jagged: bool) -> torch.Tensor:
    """Samples in one tensor."""
    if jagged:
        return torch.nested.as_nested_tensor(list(samples), layout=torch.jagged)
    return torch.stack(list(samples))


def viewed(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as another dtype; the last dimension is as much longer or shorter."""
    if not ids.is_nested:
        return ids.contiguous().view(dtype)
    return batched([one.contiguous().view(dtype) for one in ids.unbind()], jagged=True)


def wire_dtype(config: Any, utils: Any) -> tuple[torch.dtype, bool]:
    """What routes travel as through verl's own code, and whether as bytes.

    As in verl: int16 from 0.9 on. 0.7 and 0.8 narrow to uint8 on the way, whatever the number of experts; ids
    above 255 go through as bytes.
    """
    if hasattr(utils, "merge_nested_router_maps"):
        return torch.int16, False
    narrow = narrow_dtype(int(config.num_moe_experts))
    return narrow, narrow != torch.uint8
