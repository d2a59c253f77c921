"""Converts verl's route tensors to RoutedExperts, and back.

verl carries routes as [batch, sequence, layers, topk] with zeros where there is no token, or as a jagged
tensor of [tokens, layers, topk].
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from npu_replay.compat.megatron import hybrid, parallel_state
from npu_replay.compat.verl.batch_routes import (
    Routes,
    RoutesByKey,
    are_keys,
    are_refused,
    refused_at_rollout,
    rows_of,
)
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError
from npu_replay.parallel.parallel_layout import DecoderLayers, ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.rollout.admit import from_batch
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype

UTILS = "verl.utils.megatron.router_replay_utils"
_PACKERS = ("preprocess_thd_engine", "preprocess_thd_no_padding")
"""verl's packing of jagged batches, from 0.8 on and before."""


@dataclass(frozen=True)
class BatchForm:
    """Holds the form of a micro-batch: its sequences, and the model.

    Attributes:
        lengths: the number of tokens of each sequence.
        kept: the mask of a padded batch, bool, on the CPU; None of a jagged one.
        config: the model's TransformerConfig; or, of a model without one, its RoutedModel.
        local_cp_size: ranks that share it under dynamic context parallelism.
    """

    lengths: list[int]
    kept: torch.Tensor | None
    config: Any
    local_cp_size: int | None = None

    @classmethod
    def of(cls, ids: torch.Tensor, mask: Any, config: Any, local_cp_size: int | None = None) -> BatchForm:
        """Return the form of a jagged tensor [batch, tokens, ...], or of a padded one [batch, sequence, ...].

        A padded one has a mask, [batch, sequence].
        """
        if ids.is_nested:
            return cls(lengths_of(ids), None, config, local_cp_size)
        kept = mask.detach().cpu().bool()
        return cls(kept.sum(dim=1).tolist(), kept, config, local_cp_size)

    @property
    def model(self) -> RoutedModel:
        return routed_of(self.config)

    @property
    def sizes(self) -> dict[str, int]:
        return {"topk": self.model.topk, "num_experts": self.model.num_experts}

    def layout(self) -> TokenLayout:
        """Return the layout of this rank's rows: token numbers that pass through verl's packing tell it."""
        names = _PACKERS if self.kept is None else ("preprocess_packed_seqs",)
        pack: Any = next((getattr(utils(), name) for name in names if hasattr(utils(), name)), None)
        if pack is None:
            raise MicroBatchError(
                "this verl packs its batches otherwise",
                where=UTILS,
                expected=" or ".join(names),
                got="neither",
                cause="a release of verl that npu_replay doesn't know",
            )
        # The arguments that verl's own router replay gives it, as far as this release has them.
        sparse = self._is_sparse
        wanted = {
            "use_fp8_padding": getattr(self.config, "fp8", None) in ("e4m3", "hybrid"),
            "cp_layout": "contiguous" if sparse else "zigzag",
            "min_local_rows": self.config.csa_window_size if sparse else None,
            "local_cp_size": self.local_cp_size,
        }
        known = inspect.signature(pack).parameters
        arguments = {name: value for name, value in wanted.items() if name in known}

        def packed(sequences: list[torch.Tensor]) -> torch.Tensor:
            if self.kept is None:
                packed = [batched(sequences, jagged=True)]
            else:
                ones = [torch.ones_like(sequence, dtype=torch.bool) for sequence in sequences]
                packed = [pad_sequence(each, batch_first=True) for each in (sequences, ones)]
            return pack(*packed, pre_process=True, **arguments)[0]  # type: ignore[no-any-return]

        return TokenLayout.from_probe(packed, self.lengths, parallel=parallel_of(self.config))

    def check_padded(self, *, to_mini_batch: bool) -> None:
        """Raise a MicroBatchError unless the rows of this micro-batch are the same padded as packed.

        They are for one sequence, padded to what tensor and context parallelism ask for. FP8 and the context
        parallelism of DeepSeek-V4 pad and cut packed sequences otherwise. `to_mini_batch`: it is padded to
        the longest sequence of the mini-batch.
        """
        fp8 = getattr(self.config, "fp8", None)
        sequences = len(self.lengths)
        MicroBatchError.unless(
            sequences == 1 and not (to_mini_batch or fp8 or self._is_sparse),
            "the rows of this padded micro-batch aren't those of a packed one, for which routes are laid out",
            "use_remove_padding=True; or one sequence, no pad_bshd_to_minibatch_max, no fp8, no dsv4_hybrid",
            f"{sequences} sequences, pad_bshd_to_minibatch_max={to_mini_batch}, fp8={fp8}, "
            f"dsv4_hybrid={self._is_sparse}",
            "another micro-batch size in the batch, or in a worker of one's own, than in the job's config",
        )

    @property
    def _is_sparse(self) -> bool:
        """Return whether the model has DeepSeek-V4's attention, whose context parallelism cuts otherwise."""
        return getattr(self.config, "experimental_attention_variant", None) == "dsv4_hybrid"

    def filled(self, routes: Sequence[RoutedExperts], dtype: torch.dtype) -> torch.Tensor:
        """Return ids of sequences in the form of this batch; without any, as on a dense stage, 0 layers."""
        return self._shaped(
            [routes_of_sequence.ids.to(dtype) for routes_of_sequence in routes]
            or [torch.empty(size, 0, self.model.topk, dtype=dtype, device="cpu") for size in self.lengths]
        )

    def keyed(self, keys: Sequence[int]) -> torch.Tensor:
        """Return the keys of sequences in the form of this batch, in the place of their ids, int16."""
        return self._shaped([rows_of(key, size) for key, size in zip(keys, self.lengths, strict=True)])

    def _shaped(self, each: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.kept is None:
            return batched(each, jagged=True)
        out = torch.zeros(*self.kept.shape, *each[0].shape[1:], dtype=each[0].dtype, device="cpu")
        for row, ids in enumerate(each):
            out[row, self.kept[row]] = ids
        return out


@dataclass(frozen=True)
class GivenRoutes:
    """Holds what a micro-batch has for routes: ids of all decoder layers or of the MoE layers, or keys.

    Attributes:
        ids: jagged [batch, tokens, layers, topk], or padded [batch, sequence, layers, topk].
        batch: their form.
    """

    ids: torch.Tensor
    batch: BatchForm

    @classmethod
    def of(
        cls,
        ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        config: Any,
        local_cp_size: int | None = None,
    ) -> GivenRoutes:
        """Return routes of a jagged batch, or of a padded one with its mask; see `BatchForm.of`.

        Raises:
            MicroBatchError: there are none.
        """
        if ids is None:
            raise MicroBatchError(
                "this micro-batch has no routes",
                expected="routed_experts in the batch",
                got="None",
                cause="R2: the old log-probs weren't computed by the actor in this step (bypass mode); R3: "
                "the rollout didn't hand its routes on (enable_rollout_routing_replay=False)",
            )
        return cls(ids, BatchForm.of(ids, mask, config, local_cp_size))

    def samples(self) -> list[torch.Tensor]:
        """Return each sequence's routes, [tokens, layers, topk], on the CPU."""
        each = list(self.ids.detach().cpu().unbind())
        if self.batch.kept is None:
            return each
        return [sequence[kept] for sequence, kept in zip(each, self.batch.kept, strict=True)]

    def routes(
        self, *, mask: torch.Tensor | None = None, from_rollout: bool, store: RoutesByKey | None = None
    ) -> tuple[dict[int, RoutedExperts], dict[int, ReplayError]]:
        """Return the routes of each sequence, by its number, and why those of others can't be used.

        The mask, jagged or [batch, tokens], has the rows to replay; `store` has the routes behind keys;
        `from_rollout`: the ids come from a rollout engine, and weren't recorded here.
        """
        # With a top-k of 1 a recorded row may be expert 0 in all layers.
        model = self.batch.model
        zeros_are_none = from_rollout or model.topk > 1
        each = self.samples()
        masks = [None] * len(each) if mask is None else list(mask.unbind())
        store = RoutesByKey() if store is None else store
        keys = are_keys(self.ids, fetched=bool(store.layers))
        good: dict[int, RoutedExperts] = {}
        bad: dict[int, ReplayError] = {}
        for number, (ids, keep) in enumerate(zip(each, masks, strict=True)):
            how: Any = {"keep": keep, "zeros_are_none": zeros_are_none, "from_engine": from_rollout}
            try:
                routes_of_sample = store.of_sample(ids, keep, model) if keys else _admitted(ids, model, **how)
            except InvalidRoutes as error:
                bad[number] = error.with_traceback(None).at(f"sample {number} of the micro-batch")
            else:
                good[number] = routes_of_sample
        return good, bad

    def checked(self, layers: Sequence[int], tokens: torch.Tensor) -> dict[int, Routes]:
        """Check a batch's ids once for all chunks; return this rank's routes, or errors, by key from 1 on.

        The token ids, [batch, tokens], aren't used where a sample has another number of them than rows.
        """
        # All layers are checked: only the others tell a dead router from a lost layer.
        model = self.batch.model
        take = partial(_admitted, model=model, zeros_are_none=True)
        own = [layer for layer in model.layers if layer in {*layers}]
        by_key: dict[int, Routes] = {}
        for key, (rows, ids) in enumerate(zip(self.samples(), tokens.unbind(), strict=True), start=1):
            of_sample = ids.cpu().numpy() if len(ids) == len(rows) else None
            try:
                by_key[key] = take(rows, tokens=of_sample).only(own)
            except InvalidRoutes as error:
                # verl's mask excludes the last row, whose token the engine never ran.
                with contextlib.suppress(InvalidRoutes):
                    keep = torch.arange(len(rows), device="cpu") < len(rows) - 1
                    by_key[key] = take(rows, tokens=of_sample, keep=keep).only(own)
                by_key.setdefault(key, error.with_traceback(None))
        return by_key


def _admitted(rows: torch.Tensor, model: RoutedModel, **how: Any) -> RoutedExperts:
    """Return `from_batch`; raises InvalidRoutes for rows that were refused at rollout."""
    if are_refused(rows, model.num_experts):
        raise refused_at_rollout()
    return from_batch(rows, model, **how)


_DECODER = "npu_replay_decoder"
"""The attribute of a TransformerConfig with its DecoderLayers."""
_MODEL = "npu_replay_model"
"""The attribute of a TransformerConfig with its RoutedModel."""


def decoder_of(config: Any) -> DecoderLayers:
    """Return the decoder layers of a TransformerConfig; a HybridModel's by the pattern of its model."""
    if not hasattr(config, _DECODER):  # a search for the pattern takes up to 0.1 s, and each micro-batch asks
        setattr(config, _DECODER, parallel_state.decoder_layers(config, hybrid.pattern_of(config)))
    return getattr(config, _DECODER)  # type: ignore[no-any-return]


def parallel_of(config: Any) -> ParallelLayout:
    """Return this rank's place in Megatron's parallel state, with the layers of a TransformerConfig."""
    return parallel_state.read(config, decoder_of(config))


def routed_of(config: Any) -> RoutedModel:
    """Return the RoutedModel of a TransformerConfig."""
    if isinstance(config, RoutedModel):
        return config
    if not hasattr(config, _MODEL):
        decoder = decoder_of(config)
        model = RoutedModel(
            layers=tuple(decoder.moe),
            num_layers=decoder.count,
            num_experts=int(config.num_moe_experts),
            topk=int(config.moe_router_topk),
        )
        setattr(config, _MODEL, model)
    return getattr(config, _MODEL)  # type: ignore[no-any-return]


def utils() -> Any:
    return sys.modules[UTILS]


def offsets(jagged: torch.Tensor) -> torch.Tensor:
    """Return where each sequence of a jagged tensor begins, [batch + 1]."""
    return jagged.offsets()  # type: ignore[attr-defined, no-any-return]  # torch's stubs know no jagged tensors


def lengths_of(jagged: torch.Tensor) -> list[int]:
    """Return the number of tokens of each sequence of a jagged tensor."""
    return offsets(jagged).diff().tolist()


def speaks_for_samples(parallel: ParallelLayout | None) -> bool:
    """Return whether this rank counts its replica's samples: the first of the first stage with MoE layers."""
    if parallel is None:
        return True
    first = 0
    if parallel.decoder is not None:
        first = next(rank for rank in range(parallel.pp) if replace(parallel, pp_rank=rank).moe_layers)
    return (parallel.tp_rank, parallel.cp_rank, parallel.pp_rank) == (0, 0, first)


def batched(samples: Sequence[torch.Tensor], *, jagged: bool) -> torch.Tensor:
    if jagged:
        return torch.nested.as_nested_tensor(list(samples), layout=torch.jagged)
    return torch.stack(list(samples))


def viewed(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the same bytes as another dtype; the last dimension grows or shrinks."""
    if not ids.is_nested:
        return ids.contiguous().view(dtype)
    return batched([sample.contiguous().view(dtype) for sample in ids.unbind()], jagged=True)


def wire_dtype(config: Any, *, keys: bool = False) -> tuple[torch.dtype, bool]:
    """Return the dtype in which verl hands on routes, or keys in their place, and whether as bytes."""
    # int16 from 0.9.1 on. Releases up to 0.9.0 narrow to uint8, so ids above 255 pass as bytes.
    merge = getattr(utils(), "merge_nested_router_maps", None)
    if merge is not None and merge([torch.zeros(1, 1, dtype=torch.int16, device="cpu")]).dtype != torch.uint8:
        return torch.int16, False
    narrow = torch.int16 if keys else narrow_dtype(int(config.num_moe_experts))
    return narrow, narrow != torch.uint8
