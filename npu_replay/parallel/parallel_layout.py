"""ParallelLayout: describes how a training job is split over ranks, and which part this rank is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from npu_replay.errors import ReplayError, RouterError, one_of, shown, whole_number
from npu_replay.parallel.pipeline_layers import DecoderLayers
from npu_replay.routers import Model, chunks_of, find
from npu_replay.routes.arguments import StageLabels

Context: TypeAlias = Literal["zigzag", "contiguous"]
"""The way a sequence is cut: two chunks per rank, one from each end, or one piece per rank."""

_AXES = ("tp", "cp", "pp", "ep", "etp", "dp")


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
        fine = isinstance(self.decoder, DecoderLayers | None)
        problem = "decoder says which layers there are"
        ReplayError.unless(fine, problem, "DecoderLayers(...)", shown(self.decoder))
        for axis in (*_AXES, "vp"):
            for name in {axis, f"{axis}_rank"} & vars(self).keys():
                object.__setattr__(self, name, whole_number(getattr(self, name), name))
            size, rank = getattr(self, axis), getattr(self, f"{axis}_rank", 0)
            got, problem = f"{axis}={size}, {axis}_rank={rank}", f"this rank has no place in {axis}"
            ReplayError.unless(0 <= rank < size, problem, "a size of at least 1 and a rank below it", got)

    def __repr__(self) -> str:
        """Show what differs from a single process; of an axis that is split, the rank too."""
        split = {f"{axis}_rank" for axis in _AXES if getattr(self, axis) > 1}
        values = ((one, getattr(self, one.name)) for one in fields(self) if one.repr)
        shown = (
            f"{one.name}={value!r}" for one, value in values if one.name in split or value != one.default
        )
        return f"ParallelLayout({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out process groups, which are valid in their own process only."""
        return vars(self) | {"groups": ()}

    def __deepcopy__(self, memo: object = None) -> ParallelLayout:
        return self  # frozen, and a copy within the process keeps its groups

    __copy__ = __deepcopy__

    @classmethod
    def from_megatron(cls, model: Any = None, *, sequence_parallel: bool | None = None) -> ParallelLayout:
        """Read the layout from the running Megatron-core, of any release.

        Args:
            model: the model, its chunks, or its config; without one, `decoder` stays None.
            sequence_parallel: needed only without a model and with tensor parallelism.

        Raises:
            ReplayError: Megatron's parallel state isn't initialised, or a required value is unknown.
            RouterError: the built model has routers in other layers than its config says.
        """
        return _readers["megatron-core"](model, sequence_parallel)

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
        return self.tp if self.sequence_parallel and not self.gathers_rows else 1

    @property
    def cut(self) -> tuple[int, ...]:
        """Return what decides this rank's rows: context parallel size and rank, slices, its slice."""
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
        return self.context_pieces(context) * (self.tp if self.sequence_parallel else 1)

    def check(self, model: Model) -> None:
        """Check `moe_layers` against the routers of the built model.

        Raises:
            RouterError: they differ. Replay follows the routers' numbers, so either this list is wrong or the
                product numbers its layers wrongly.
        """
        chunks = chunks_of(model)
        found = sorted(router.label for routers in find(chunks) for router in routers)
        RouterError.unless(
            tuple(found) == self.moe_layers,
            "the routers of the model are in other decoder layers than its config says",
            list(self.moe_layers),
            found,
            "another pipeline split than the config's, or layer numbers that come out wrong "
            "(Megatron-core 0.12 and 0.13, virtual stages and only num_layers_in_last_pipeline_stage)",
            f"pipeline rank {self.pp_rank} of {self.pp}, {self.vp} virtual stages",
        )


_readers: dict[str, Callable[[Any, bool | None], ParallelLayout]] = {}


def register_reader(product: str, reader: Callable[[Any, bool | None], ParallelLayout]) -> None:
    """Register a reader of a product's running parallel state; the same name again replaces it."""
    _readers[product] = reader
