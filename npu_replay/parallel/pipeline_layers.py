"""DecoderLayers: names a model's decoder layers, and their split into pipeline stages.

The rules are Megatron-core's (`get_num_layers_to_build` and `get_transformer_layer_offset`, 0.12 to 0.19).
Layers are 0-based here, and multi-token prediction doesn't count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from npu_replay.errors import ReplayError, listed, whole_number
from npu_replay.routes.checks import MAX_LAYERS


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
        for name in ("count", "first_stage", "last_stage"):
            if name == "count" or getattr(self, name) is not None:
                number = whole_number(getattr(self, name), name)
                object.__setattr__(self, name, number)
                _check(number >= 0, f"{name} is negative", ">= 0", number)
        fine, most = self.count <= MAX_LAYERS, f"<= {MAX_LAYERS}"
        _check(fine, "no model has so many decoder layers", most, self.count)
        freq: Any = self.moe_layer_freq  # numpy's integers too, and a config's string
        if isinstance(freq, str) or not isinstance(freq, Iterable):
            freq = whole_number(freq, "moe_layer_freq")
            _check(freq >= 1, "moe_layer_freq must be positive", ">= 1", freq)
        else:
            freq = _whole(freq, "moe_layer_freq")
            fine, expected = {*freq} <= {0, 1}, "1 for MoE, 0 for dense"
            _check(fine, "moe_layer_freq has others than 0 and 1", expected, freq)
            problem = "moe_layer_freq has another length than there are layers"
            _check(len(freq) == self.count, problem, self.count, len(freq))
        object.__setattr__(self, "moe_layer_freq", freq)
        if self.table is not None:
            stages = listed(self.table, "the pipeline layout", most=MAX_LAYERS)
            table = tuple(_whole(stage, "a stage of the pipeline layout") for stage in stages)
            object.__setattr__(self, "table", table)
            total, least = sum(map(sum, table)), min((min(stage, default=0) for stage in table), default=0)
            _check(least >= 0, "the pipeline layout has a negative number of layers", ">= 0", least)
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
        given = pp, vp, pp_rank, vp_rank
        pp, vp, pp_rank, vp_rank = (whole_number(one, "a pipeline's size or rank") for one in given)
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
            labels, sizes = pattern_labels(self.pattern), [*map(len, _stages(self.pattern))]
            if len(sizes) == 1:  # no | ends a stage: the symbols are dealt out as layers are
                whole = DecoderLayers(sizes[0], first_stage=self.first_stage, last_stage=self.last_stage)
                counts = whole._counts(pp, vp)
                sizes = [counts[rank][stage] for stage in range(vp) for rank in range(pp)]
            problem = f"{self.pattern!r} has other pipeline stages"
            _check(len(sizes) == pp * vp, problem, f"{pp} x {vp}", len(sizes))
            spans = zip(sizes, accumulate(sizes), strict=True)
            found = [sum(label is not None for label in labels[end - size : end]) for size, end in spans]
            return [found[rank::pp] for rank in range(pp)]
        if self.table is not None:
            shape = [len(stage) for stage in self.table]
            _check(shape == [vp] * pp, "the pipeline layout has another shape", f"{pp} x {vp}", shape)
            return self.table
        ends = (0, self.first_stage), (pp - 1, self.last_stage)
        told = {rank: count for rank, count in ends if count is not None}
        embedding, loss = (self.embedding_counts, self.loss_counts) if pp > 1 else (False, False)
        if pp == 1:
            for _, count in ends:
                _check(count in (None, self.count), "the one stage has all layers", self.count, count)
        problem = "an uneven pipeline can't count embedding or loss as layers"
        fine = not told or not (embedding or loss)
        _check(fine, problem, "one or the other, as Megatron-core has it", "both")
        rest = self.count + embedding + loss - sum(told.values())
        others = pp - len(told)
        _check(others > 0 or rest == 0, "first and last stage leave layers over", 0, rest)
        each = _share(rest, others, "pipeline ranks") if others else 0
        dealt = [[_share(told.get(rank, each), vp, "virtual stages")] * vp for rank in range(pp)]
        # The embedding and the loss counted as layers above; they hold none.
        dealt[0][0] -= embedding
        dealt[-1][-1] -= loss
        return dealt


def pattern_labels(pattern: str) -> list[int | None]:
    """Return the decoder layer of each symbol of a HybridModel's pattern; None for the mixer of a block.

    `-` is a dense MLP, `E` has experts, any other is a mixer; `|` ends a stage, and `/` the decoder. Labels
    count as a Hugging Face config does: if each `-` and `E` has a mixer, two symbols are a layer; in other
    patterns each symbol is a layer, as in Nemotron's configs.

    >>> from npu_replay.parallel.pipeline_layers import pattern_labels
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


def _whole(given: Any, what: str) -> tuple[int, ...]:
    return tuple(whole_number(one, f"each entry of {what}") for one in listed(given, what, most=MAX_LAYERS))


def _share(count: int, parts: int, of: str) -> int:
    problem = f"the decoder layers can't be dealt out evenly to the {of}"
    _check(count >= 0 and count % parts == 0, problem, f"a multiple of {parts}", count)
    return count // parts


def _check(fine: bool, problem: str, expected: object, got: object) -> None:
    if not fine:
        raise ReplayError(problem, expected=expected, got=got, cause="numbers of another model or pipeline")
