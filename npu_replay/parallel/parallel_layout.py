"""Describes how a training job is split: ParallelLayout over ranks, DecoderLayers over pipeline stages.

A pipeline's rules are Megatron-core's (`get_num_layers_to_build`, `get_transformer_layer_offset`, 0.12 to
0.19). Layers are 0-based here, and multi-token prediction doesn't count.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from npu_replay.errors import ReplayError, RouterError, one_of
from npu_replay.routers import Model, chunks_of, find
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.checks import MAX_LAYERS

Context: TypeAlias = Literal["zigzag", "contiguous"]
"""The way a sequence is cut: two chunks per rank, one from each end, or one piece per rank."""

_AXES = ("tp", "cp", "pp", "ep", "etp", "dp")


@dataclass(frozen=True)
class DecoderLayers:
    """Describes the decoder layers of a whole model.

    >>> model = npu_replay.DecoderLayers(8, moe_layer_freq=[0] + [1] * 7)
    >>> model.stage(pp=2, vp=2, pp_rank=0, vp_rank=1)
    (4, 5)

    Args:
        count: their number (num_layers).
        moe_layer_freq: n: each n-th layer is MoE, beginning with the first; or a list of 1 for MoE and 0 for
            dense, one per layer.
        first_stage: layers of the first pipeline rank, over all its virtual stages
            (num_layers_in_first_pipeline_stage).
        last_stage: those of the last (num_layers_in_last_pipeline_stage).
        embedding_counts: the embedding takes a layer's place (account_for_embedding_in_pipeline_split).
        loss_counts: the loss takes one (account_for_loss_in_pipeline_split).
        table: layers of each stage, by pipeline rank and virtual stage, instead of the rules above
            (pipeline_model_parallel_layout).
        pattern: of a HybridModel, whose stages follow it; `of_pattern` reads it.

    Raises:
        ReplayError: a list of another length or of others than 0 and 1, numbers that are negative or aren't
            whole, a table with another number of layers, more layers than any model has.
    """

    count: int
    moe_layer_freq: int | Sequence[int] = 1
    first_stage: int | None = None
    last_stage: int | None = None
    embedding_counts: bool = False
    loss_counts: bool = False
    table: Sequence[Sequence[int]] | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        count = operator.index(self.count)
        _check(0 <= count <= MAX_LAYERS, "no model has so many decoder layers", f"0 to {MAX_LAYERS}", count)
        freq: Any = self.moe_layer_freq
        if not isinstance(freq, Iterable):
            freq = operator.index(freq)
            _check(freq >= 1, "moe_layer_freq must be positive", ">= 1", freq)
        else:
            freq = tuple(map(operator.index, freq))
            _check(
                {*freq} <= {0, 1}, "moe_layer_freq has others than 0 and 1", "1 for MoE, 0 for dense", freq
            )
            _check(
                len(freq) == count,
                "moe_layer_freq has another length than there are layers",
                count,
                len(freq),
            )
        object.__setattr__(self, "moe_layer_freq", freq)
        if self.table is not None:
            table = tuple(tuple(map(operator.index, stage)) for stage in self.table)
            object.__setattr__(self, "table", table)
            total = sum(map(sum, table))
            _check(total == self.count, "the pipeline layout has other layers", self.count, total)

    @classmethod
    def of_pattern(
        cls, pattern: str, *, first_stage: int | None = None, last_stage: int | None = None
    ) -> DecoderLayers:
        """Read the pattern of a HybridModel: its k-th `E` is the k-th MoE layer of a Hugging Face config.

        >>> [npu_replay.DecoderLayers.of_pattern(pattern).moe for pattern in ("*-*E|*E", "MEM*E")]
        [(1, 2), (1, 4)]

        Args:
            pattern: hybrid_layer_pattern. A mixer and its `-` or `E` are one layer, if all are such pairs.
            first_stage, last_stage: in symbols, if no `|` ends the stages.
        """
        named = zip("".join(_stages(pattern)), pattern_labels(pattern), strict=True)
        kinds = [int(symbol == "E") for symbol, label in named if label is not None]
        return cls(len(kinds), kinds, first_stage=first_stage, last_stage=last_stage, pattern=pattern)

    @property
    def moe(self) -> tuple[int, ...]:
        """Return the layers with a router, ascending."""
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            return tuple(range(0, self.count, freq))
        return tuple(layer for layer, is_moe in enumerate(freq) if is_moe)

    def stage(self, pp: int, vp: int, pp_rank: int, vp_rank: int) -> tuple[int, ...]:
        """Return the layers of one virtual stage of one pipeline rank, ascending.

        Args:
            pp: pipeline ranks.
            vp: virtual stages of each; 1 without interleaving.
            pp_rank: the pipeline rank.
            vp_rank: its virtual stage.

        Raises:
            ReplayError: the layers can't be split evenly into that many stages.
        """
        there = 0 <= pp_rank < pp and 0 <= vp_rank < vp
        _check(there, "there is no such stage", f"ranks below {pp} and {vp}", (pp_rank, vp_rank))
        counts = self._counts(pp, vp)
        # A virtual stage follows the same virtual stage of the rank before it.
        before = sum(counts[rank][stage] for stage in range(vp_rank) for rank in range(pp))
        before += sum(counts[rank][vp_rank] for rank in range(pp_rank))
        return tuple(range(before, before + counts[pp_rank][vp_rank]))

    def _counts(self, pp: int, vp: int) -> Sequence[Sequence[int]]:
        """Return the decoder layers of each stage, [pipeline rank][virtual stage]."""
        if self.pattern is not None:
            labels = pattern_labels(self.pattern)
            sizes = [*map(len, _stages(self.pattern))]
            if len(sizes) == 1:  # no | ends a stage: the symbols are dealt out as layers are
                whole = DecoderLayers(sizes[0], first_stage=self.first_stage, last_stage=self.last_stage)
                counts = whole._counts(pp, vp)
                sizes = [counts[rank][stage] for stage in range(vp) for rank in range(pp)]
            _check(
                len(sizes) == pp * vp,
                f"{self.pattern!r} has other pipeline stages",
                f"{pp} x {vp}",
                len(sizes),
            )
            # A stage has as many decoder layers as symbols with a label: mixers of a block have none.
            spans = zip(sizes, accumulate(sizes), strict=True)
            per_stage = [sum(label is not None for label in labels[end - size : end]) for size, end in spans]
            # Stages are in the order of the layers: rank 0, 1, ..., and again from rank 0 with interleaving.
            return [per_stage[rank::pp] for rank in range(pp)]
        if self.table is not None:
            shape = [len(stage) for stage in self.table]
            _check(shape == [vp] * pp, "the pipeline layout has another shape", f"{pp} x {vp}", shape)
            return self.table
        ends = (0, self.first_stage), (pp - 1, self.last_stage)
        ends_given = {rank: count for rank, count in ends if count is not None}
        embedding, loss = (self.embedding_counts, self.loss_counts) if pp > 1 else (False, False)
        _check(
            not ends_given or not (embedding or loss),
            "an uneven pipeline can't count embedding or loss as layers",
            "one or the other, as Megatron-core has it",
            "both",
        )
        # What the ends leave is shared evenly; the embedding and the loss each take one layer's place in it.
        rest = self.count + embedding + loss - sum(ends_given.values())
        others = pp - len(ends_given)
        _check(others > 0 or rest == 0, "first and last stage leave layers over", 0, rest)
        each = _share(rest, others, "pipeline ranks") if others else 0
        dealt = [[_share(ends_given.get(rank, each), vp, "virtual stages")] * vp for rank in range(pp)]
        # The embedding and the loss counted as layers above; they hold none.
        dealt[0][0] -= embedding
        dealt[-1][-1] -= loss
        return dealt


def pattern_labels(pattern: str) -> list[int | None]:
    """Return the decoder layer of each symbol of a HybridModel's pattern; None for the mixer of a block.

    `-` is a dense MLP, `E` has experts, any other is a mixer; `|` ends a stage, and `/` the decoder. Labels
    count as a Hugging Face config does: if each `-` and `E` has a mixer, two symbols are a layer; in other
    patterns each symbol is a layer, as in Nemotron's configs.

    >>> from npu_replay.parallel.parallel_layout import pattern_labels
    >>> pattern_labels("*-*E"), pattern_labels("MEM*E")
    ([None, 0, None, 1], [0, 1, 2, 3, 4])
    """
    symbols = "".join(_stages(pattern))
    if re.fullmatch("([^-E][-E])+", symbols):
        return [place // 2 if place % 2 else None for place in range(len(symbols))]
    return [*range(len(symbols))]


def _stages(pattern: str) -> list[str]:
    """Return the symbols of each pipeline stage, virtual ones too; one stage if no `|` ends any."""
    return pattern.partition("/")[0].split("|")


def _share(count: int, parts: int, of: str) -> int:
    _check(
        count >= 0 and count % parts == 0,
        f"the decoder layers can't be dealt out evenly to the {of}",
        f"a multiple of {parts}",
        count,
    )
    return count // parts


def _check(fine: bool, problem: str, expected: object, got: object) -> None:
    ReplayError.unless(fine, problem, expected, got, "numbers of another model or pipeline")


@dataclass(frozen=True, kw_only=True, repr=False)
class ParallelLayout:
    """Describes the sizes of a job's parallel axes, and this rank's place in each.

    >>> layers = npu_replay.DecoderLayers(8)
    >>> npu_replay.ParallelLayout(pp=2, pp_rank=1, decoder=layers).moe_layers
    (4, 5, 6, 7)

    Args:
        tp, cp, pp, ep, etp, dp: ranks of tensor, context, pipeline and expert parallelism, tensor parallelism
            within experts, and data parallelism. With `_rank`: this rank's number among them.
        vp: virtual stages of each pipeline rank; all of them are on this rank.
        sequence_parallel: each tensor-parallel rank has a slice of the rows.
        gathers_rows: its routers still see the rows of the whole tensor-parallel group (alltoall_seq of
            Megatron-core 0.12, which gathers the logits first).
        decoder: the model's decoder layers, from which `layers` and `moe_layers` follow.
        groups: the process groups that `collect` merges over, one after the other: the ranks that share a
            pipeline stage, then the stages.

    Raises:
        ReplayError: a size below 1, or a rank that is not below its size.
    """

    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    vp: int = 1
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0
    sequence_parallel: bool = False
    gathers_rows: bool = False
    decoder: DecoderLayers | None = None
    groups: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for axis in (*_AXES, "vp"):
            for name in {axis, f"{axis}_rank"} & vars(self).keys():
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            size = getattr(self, axis)
            rank = getattr(self, f"{axis}_rank", 0)
            if not 0 <= rank < size:
                raise ReplayError(
                    f"this rank has no place in {axis}",
                    expected="a size of at least 1 and a rank below it",
                    got=f"{axis}={size}, {axis}_rank={rank}",
                )

    def __repr__(self) -> str:
        """Show what differs from a single process; of an axis that is split, the rank too."""
        split = {f"{axis}_rank" for axis in _AXES if getattr(self, axis) > 1}
        values = ((field_, getattr(self, field_.name)) for field_ in fields(self) if field_.repr)
        shown = (
            f"{field_.name}={value!r}"
            for field_, value in values
            if field_.name in split or value != field_.default
        )
        return f"ParallelLayout({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out process groups, which are valid in their own process only."""
        return vars(self) | {"groups": ()}

    @classmethod
    def from_megatron(cls, model: Any) -> ParallelLayout:
        """Read the layout from the running Megatron-core, of any release.

        Args:
            model: the model, its chunks, or its config.

        Raises:
            ReplayError: Megatron's parallel state isn't initialised, or a required value is unknown.
            RouterError: the built model has routers in other layers than its config says.
        """
        return _readers["megatron-core"](model)

    @property
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return the decoder layers of each virtual stage on this rank, 0-based."""
        decoder = self._known_decoder()
        return tuple(decoder.stage(self.pp, self.vp, self.pp_rank, stage) for stage in range(self.vp))

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the decoder layers on this rank, ascending; multi-token prediction doesn't count."""
        return tuple(sorted(layer for chunk in self.chunk_layers for layer in chunk))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the layers on this rank that have a router; empty on a stage of dense layers."""
        decoder = self._known_decoder()
        # A HybridModel counts its mixers too: its labels are matched by their place among all routers.
        whole = () if decoder.pattern is None else decoder.moe
        return StageLabels(sorted({*self.layers}.intersection(decoder.moe)), whole)

    def _known_decoder(self) -> DecoderLayers:
        if self.decoder is None:
            raise ReplayError(
                "this layout doesn't know the model's decoder layers",
                expected="ParallelLayout(decoder=DecoderLayers(...)) or from_megatron(model)",
                got="decoder=None",
            )
        return self.decoder

    @property
    def slices_rows(self) -> int:
        """Return the number of slices of the router's rows in the tensor-parallel group."""
        # Routers that gather before their top-k see the rows of all slices.
        return self.tp if self.sequence_parallel and not self.gathers_rows else 1

    @property
    def cut(self) -> tuple[int, ...]:
        """Return what decides this rank's rows: context parallel size and rank, slices, its slice."""
        # Ranks that don't slice rows have the same ones, so their place in the group doesn't count.
        slices = self.slices_rows
        return self.cp, self.cp_rank, slices, self.tp_rank if slices > 1 else 0

    def context_pieces(self, context: Context = "zigzag") -> int:
        """Return the number of pieces that context parallelism cuts a sequence into."""
        one_of(context, ("zigzag", "contiguous"), "context")
        if self.cp == 1:
            return 1
        return 2 * self.cp if context == "zigzag" else self.cp

    def alignment(self, context: Context = "zigzag") -> int:
        """Return the multiple that sequences are padded to, in tokens, for equal shares on all ranks."""
        # By tp also where routers gather the rows: the model itself slices them before.
        return self.context_pieces(context) * (self.tp if self.sequence_parallel else 1)

    def check(self, model: Model) -> None:
        """Check `moe_layers` against the routers of the built model.

        Raises:
            RouterError: they differ. Replay follows the routers' numbers, so either this list is wrong or the
                product numbers its layers wrongly.
        """
        chunks = chunks_of(model)
        labels = sorted(router.label for routers in find(chunks) for router in routers)
        RouterError.unless(
            tuple(labels) == self.moe_layers,
            "the routers of the model are in other decoder layers than its config says",
            where=f"pipeline rank {self.pp_rank} of {self.pp}, {self.vp} virtual stages",
            expected=list(self.moe_layers),
            got=labels,
            cause="another pipeline split than the config's, or layer numbers that come out wrong "
            "(Megatron-core 0.12 and 0.13, virtual stages and only num_layers_in_last_pipeline_stage)",
        )


_readers: dict[str, Callable[[Any], ParallelLayout]] = {}


def register_reader(product: str, reader: Callable[[Any], ParallelLayout]) -> None:
    """Register a reader of a product's running parallel state; the same name again replaces it."""
    _readers[product] = reader
