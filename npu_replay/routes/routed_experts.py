"""RoutedExperts: holds the experts that a pass chose, labelled by layer so that they can't shift.

The terms of this project: a *layer* is a decoder layer of the model; its *label* is its number in the whole
model, from 0; a *column* is its place in an array. A *token* is one of a sequence; a *row* is its place in an
array, in the order in which the router gets them. A *micro-batch* is one call of the model, and its input.
A router's *own* choice is what its scores give in the running forward; *live* means the same where a replay
is compared with it. A *native* row is one without a route: there the own choice counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes
from npu_replay.routes import arguments, checks
from npu_replay.routes.arguments import IdArray, StageLabels
from npu_replay.routes.atomic_file import plain_file, reader, write_whole
from npu_replay.routes.checks import Array, Finding
from npu_replay.routes.encoding import decode, encode, read_errors_as
from npu_replay.routes.fingerprint import SampleKey, with_key
from npu_replay.routes.inputs import Inputs


def narrow_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that every back end computes with: uint8 up to 256 experts, int16 above."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def narrow_array_dtype(num_experts: int) -> np.dtype[Any]:
    """Return `narrow_dtype` as a numpy dtype."""
    return np.dtype(np.uint8 if narrow_dtype(num_experts) == torch.uint8 else np.int16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Describes where the rows of a micro-batch lie; by default nothing is known.

    Attributes:
        bad_samples: sequences whose routes couldn't be used, as `TokenLayout.gather` counts them.
        row_order: "sequence" or "batch".
        inputs: the tokens of the micro-batch; from `record` also a digest of its images.
        rows: the packed token in each row, int64 [rows], -1 for padding, if a `TokenLayout` placed the rows.
        lengths: those of the packed sequences.
        unnamed: some of the sequences' routes had no fingerprint, so that `inputs` has the layout's alone.
    """

    bad_samples: int = 0
    row_order: str | None = None
    inputs: Inputs | None = None
    rows: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    unnamed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RoutedExperts:
    """Holds the expert ids that one pass chose for some tokens.

    Building one checks the shape, the range of every id and that no recorded row names an expert twice in a
    layer.

    Args:
        ids: [tokens, layers, topk], torch or numpy, any integer dtype; kept as a CPU tensor, uint8 up to
            256 experts and int16 above. Logical expert ids, before any EPLB mapping.
        layers: one global 0-based decoder-layer index per column, ascending.
        num_experts: routed experts of a layer, up to 32,767.
        recorded: [tokens] bool, the rows that carry a route; all of them when not given. The ids of other
            rows are stored as 0 and never read: such a row takes the router's own choice.
        fingerprint: `npu_replay.fingerprint` of the sequence, if this is one sequence.
        weight_version: the weights that chose, if known.
        constant_layers_ok: `load` accepts a layer that is the same in all rows: the trainer's own routers
            chose so, or the tokens explain it.
        from_engine: True if a rollout engine chose: `replay` refuses rows that are far from the routers' own
            choice. False if the trainer's routers chose, as `record` sets it. None, of rows made by hand:
            `replay` logs one WARNING if they are far from it.
        copy: False keeps the array where that is possible. Nothing may write to it afterwards.

    >>> ids = np.array([[[0, 3], [1, 2]], [[2, 1], [0, 1]], [[-1, -1], [-1, -1]]])
    >>> routes = npu_replay.RoutedExperts(
    ...     ids=ids, layers=[3, 7], num_experts=4, recorded=np.array([True, True, False])
    ... )
    >>> routes
    RoutedExperts(3 tokens, 2 layers, top-2 of 4, 1 rows without a route)
    >>> routes.layer_ids(7).tolist()
    [[1, 2], [0, 1], [0, 0]]
    >>> routes.take([1, -1]).recorded.tolist()
    [True, False]
    >>> routes.only([7]).layers, len(npu_replay.RoutedExperts.concat([routes, routes]))
    ((7,), 6)
    >>> npu_replay.RoutedExperts.from_bytes(routes.to_bytes()) == routes
    True

    Raises:
        InvalidRoutes: a check fails; the error names the layer, the number of rows and the usual cause.
    """

    ids: torch.Tensor = field(init=False)
    layers: tuple[int, ...] = field(init=False)
    num_experts: int = field(init=False)
    recorded: torch.Tensor = field(init=False)
    fingerprint: int | None = field(init=False)
    weight_version: int | str | None = field(init=False)
    constant_layers_ok: bool = field(init=False)
    from_engine: bool | None = field(init=False)

    placement: Placement = field(default=Placement(), init=False)
    """Where the rows of a micro-batch lie. A pickle carries it; bytes and files carry its `row_order`,
    `unnamed`, and of `inputs` the digests."""
    shown: torch.Tensor | None = field(default=None, init=False)
    """From `record` and `observe`, where tokens over an expert's capacity are dropped: the ids that ran,
    int16 [tokens, layers, topk], with -1 in the place of each that lost the token. A pickle carries it;
    bytes, files and other rows made of these don't."""

    made_at: float = field(default=0.0, init=False)
    """When these rows were decoded, loaded or built, in seconds since the epoch; of several parts the
    earliest. Rows that were made before an update of the weights are judged less strictly."""

    def __init__(
        self,
        *,
        ids: IdArray,
        layers: Sequence[int],
        num_experts: int,
        recorded: IdArray | None = None,
        fingerprint: int | None = None,
        weight_version: int | str | None = None,
        constant_layers_ok: bool = False,
        from_engine: bool | None = None,
        copy: bool = True,
    ) -> None:
        wide = arguments.ids(ids)
        labels = tuple(arguments.labels(layers, wide.shape[1]))
        rows = arguments.mask(recorded, tokens=len(wide))
        num_experts = arguments.num_experts(num_experts, wide.shape[2])
        _refuse(checks.find_outside(wide.numpy(), num_experts, rows.numpy()), labels, checks.OUTSIDE_CAUSE)
        narrow = wide.to(narrow_dtype(num_experts))
        if bool(narrow[~rows].any()):
            narrow = narrow.masked_fill(~rows[:, None, None], 0)
        _refuse(checks.find_twice(narrow.numpy(), rows.numpy()), labels, checks.TWICE_CAUSE)
        narrow = narrow.contiguous()
        # A conversion above has made a copy already, unless the memory is still the caller's.
        address = ids.ctypes.data if isinstance(ids, np.ndarray) else ids.data_ptr()
        vars(self).update(  # the class is frozen
            made_at=time.time(),
            ids=narrow.clone() if copy and narrow.data_ptr() == address else narrow,
            layers=labels,
            num_experts=num_experts,
            recorded=rows,
            fingerprint=arguments.fingerprint(fingerprint),
            weight_version=arguments.weight_version(weight_version),
            constant_layers_ok=bool(constant_layers_ok),
            from_engine=None if from_engine is None else bool(from_engine),
        )

    @classmethod
    def of_checked(cls, **values: Any) -> RoutedExperts:
        """Build routes from values that were checked before; nothing is checked, narrowed or copied again."""
        made = cls.__new__(cls)
        vars(made).update({"made_at": time.time()} | values)
        return made

    def with_known(self, **values: Any) -> RoutedExperts:
        """Return the same rows with further values set; nothing is checked."""
        return self.of_checked(**vars(self) | values)

    def with_rows(self, ids: torch.Tensor, recorded: torch.Tensor, **values: Any) -> RoutedExperts:
        """Return other rows made of these routes, unchecked; they lose fingerprint and micro-batch."""
        kept = {name: value for name, value in vars(self).items() if name not in _OF_MICRO_BATCH}
        known = {"ids": ids, "recorded": recorded, "fingerprint": None}
        return self.of_checked(**kept | known | values)

    @property
    def topk(self) -> int:
        """Return the experts per token in a layer."""
        return self.ids.shape[2]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __repr__(self) -> str:
        shape = f"{len(self)} tokens, {len(self.layers)} layers, top-{self.topk} of {self.num_experts}"
        return f"RoutedExperts({shape}, {len(self) - int(self.recorded.sum())} rows without a route)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        names = ("layers", "num_experts", "fingerprint", "weight_version")
        arrays = (self.ids, other.ids), (self.recorded, other.recorded)
        return all(getattr(self, name) == getattr(other, name) for name in names) and all(
            torch.equal(ours, theirs) for ours, theirs in arrays
        )

    __hash__ = None  # type: ignore[assignment]

    def layer_ids(self, layer: int) -> torch.Tensor:
        """Return the ids of one decoder layer, [tokens, topk], narrow dtype."""
        return self.ids[:, self.columns(arguments.labels([layer]))][:, 0]

    def take(self, rows: torch.Tensor | np.ndarray | Sequence[int]) -> RoutedExperts:
        """Return the routes at these rows, in this order.

        The result is another sequence, so it carries no fingerprint.

        Args:
            rows: integers, [n]; a negative one makes a row without a route (padding, say). Or a bool mask,
                [tokens].

        >>> routes.take([1, -1])
        RoutedExperts(2 tokens, 2 layers, top-2 of 4, 1 rows without a route)
        """
        index = arguments.on_host(rows)
        if index.dtype == torch.bool and index.shape == (len(self),):
            index = index.nonzero()[:, 0]
        elif not index.numel() and index.dtype != torch.bool:
            index = index.long()  # torch makes [] float32
        whole = index.dtype in arguments.INTEGERS
        largest = int(index.max()) if whole and index.numel() else -1
        if not (whole and index.dim() == 1 and largest < len(self)):
            raise InvalidRoutes(
                "take() was asked for rows that aren't there",
                expected=f"integers below {len(self)}, [n], or a bool mask, [{len(self)}]",
                got=f"{index.dtype}, shape {tuple(index.shape)}" + (f", largest {largest}" if whole else ""),
                cause="the routes of another sequence, or a layout made for other lengths",
            )
        ids = self.ids.numpy()
        recorded = self.recorded.numpy()
        if not len(self):  # all rows are negative then, and np.take needs a row to read
            ids, recorded = np.zeros((1, *ids.shape[1:]), ids.dtype), np.zeros(1, np.bool_)
        # np.take copies whole rows at once; with mode="clip" a negative row reads row 0 and is blanked below.
        at = index.long().numpy()
        missing = at < 0
        taken = np.take(ids, at, axis=0, mode="clip")
        taken[missing] = 0
        known = np.take(recorded, at, mode="clip")
        known[missing] = False
        return self.with_rows(torch.from_numpy(taken), torch.from_numpy(known))

    @classmethod
    def concat(cls, parts: Sequence[RoutedExperts], layers: Sequence[int] | None = None) -> RoutedExperts:
        """Concatenate the rows of several RoutedExperts.

        The weight version is kept if all parts agree on it; the fingerprint is dropped.

        Args:
            parts: all of the same top-k and number of experts.
            layers: only these decoder layers, ascending, which every part must have. When not given: all
                layers, which must be the same in every part.
        """
        InvalidRoutes.unless(len(parts) > 0, "concat() needs at least one RoutedExperts", ">= 1", 0)
        first = parts[0]
        alike = ("num_experts", "topk") if layers is not None else ("layers", "num_experts", "topk")
        for number, part in enumerate(parts):
            for what in alike:
                ours = getattr(first, what)
                theirs = getattr(part, what)
                if ours != theirs:
                    raise InvalidRoutes(
                        f"part {number} of concat() has other {what}",
                        expected=ours,
                        got=theirs,
                        cause="routes of different models, or of engines that report other columns",
                    )
        labels = first.layers if layers is None else arguments.labels(layers)
        # Once for each set of layers, as most parts share one.
        columns = {of: part.columns(labels) for of, part in {part.layers: part for part in parts}.items()}
        return first.with_rows(
            torch.cat([part.ids[:, columns[part.layers]] for part in parts]),
            torch.cat([part.recorded for part in parts]),
            layers=tuple(labels),
            **arguments.known_of_all(parts),
        )

    @classmethod
    def unrecorded(cls, tokens: int, *, layers: Sequence[int], topk: int, num_experts: int) -> RoutedExperts:
        """Make the routes of a sample that has none: no row is recorded, and the router chooses for all."""
        labels = arguments.labels(layers)
        num_experts = arguments.num_experts(num_experts, topk)
        return cls(
            ids=torch.zeros(tokens, len(labels), topk, dtype=narrow_dtype(num_experts), device="cpu"),
            layers=labels,
            num_experts=num_experts,
            recorded=torch.zeros(tokens, dtype=torch.bool, device="cpu"),
            constant_layers_ok=True,
            from_engine=False,
        )

    def only(self, layers: Sequence[int]) -> RoutedExperts:
        """Return the routes of these decoder layers, ascending.

        >>> routes.layers, routes.only([7]).layers
        ((3, 7), (7,))

        Raises:
            InvalidRoutes: one of them isn't here.
        """
        labels = arguments.labels(layers)
        columns = self.columns(labels)
        shown = None if self.shown is None else self.shown[:, columns]
        return self.with_known(ids=self.ids[:, columns], layers=tuple(labels), shown=shown)

    def columns(self, labels: tuple[int, ...]) -> slice | list[int]:
        """Return the columns of these layers; a slice, which copies nothing, if they are neighbours."""
        if isinstance(labels, StageLabels):
            labels = labels.among(self.layers)
        if labels == self.layers:
            return slice(None)
        columns = [self.layers.index(layer) for layer in labels if layer in self.layers]
        if len(columns) != len(labels) or columns != sorted(set(columns)):
            raise InvalidRoutes(
                "asked for layers that aren't here, or not in ascending order",
                expected=f"some of {self.layers}",
                got=labels,
                cause="routes of another pipeline stage, or 1-based numbers (Megatron's layer_number)",
            )
        if columns and columns[-1] - columns[0] == len(columns) - 1:
            return slice(columns[0], columns[-1] + 1)
        return columns

    def sequence(self, first: int, end: int, fingerprint: int | None = None) -> RoutedExperts:
        """Return the rows from `first` to before `end` as one sequence; the ids are shared, not copied."""
        rows = slice(first, end)
        mark = arguments.fingerprint(fingerprint)
        return self.with_rows(self.ids[rows], self.recorded[rows], fingerprint=mark)

    def of_sample(self, sample_key: SampleKey) -> RoutedExperts:
        """Return these routes with this key in their fingerprint: see `npu_replay.fingerprint`."""
        if self.fingerprint is None:
            raise InvalidRoutes(
                "a sample_key needs routes with a fingerprint", expected="fingerprint=", got=self
            )
        return self.sequence(0, len(self), with_key(self.fingerprint or 0, sample_key))

    def check_not_constant(self, tokens: Array | None = None) -> RoutedExperts:
        """Refuse a layer that is the same in 64 or more recorded rows of different tokens; return self.

        It is for routes from outside: rollout engines fail in this way without an error. A constant layer of
        neither zeros nor 0 to k - 1, beside layers that vary, comes from a dead router and gets one WARNING.

        Args:
            tokens: [tokens], their ids; without them each counts as another, unless `constant_layers_ok`.
        """
        if not self.constant_layers_ok:
            ids = self.ids.numpy()
            rows = self.recorded.numpy()
            finding = checks.find_constant(ids, rows, self.num_experts, tokens, self.layers)
            _refuse(finding, self.layers, checks.CONSTANT_CAUSE)
        return self

    def to_bytes(self) -> bytes:
        """Return a self-describing byte string in the safetensors layout."""
        return b"".join(self.to_buffers())

    def to_buffers(self) -> list[bytes | memoryview]:
        """Return `to_bytes` in three pieces, without copying the ids, for `writelines`."""
        return encode({"": self.encodable()})

    def encodable(self) -> dict[str, Any]:
        """Return the values that are written: the arguments that make these routes, with numpy arrays."""
        arrays = {"ids": self.ids.contiguous().numpy(), "recorded": self.recorded.contiguous().numpy()}
        return vars(self) | arrays | {"placement": self.placement}

    def __reduce__(self) -> tuple[Any, ...]:
        # With protocol 5 a pickler takes numpy arrays out of band: Ray copies the ids neither when it stores
        # them nor when it reads them.
        return _unpickled, (self.encodable(),)

    @classmethod
    def of_decoded(cls, values: dict[str, Any]) -> RoutedExperts:
        """Build routes from the values that `encoding` read, and check them."""
        placement = Placement(**values.pop("micro_batch"))
        return cls(**values, copy=False).with_known(placement=placement)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RoutedExperts:
        """Read the result of `to_bytes`, without copying the ids, and check it as data from outside.

        The ids stay in `data`: a bytearray, or a map of a file, must not be written to while they are in use.

        Raises:
            RouteFileError: the bytes are something else, cut short or changed.
            InvalidRoutes: the routes in it are wrong.
        """
        cause = "they were cut short or changed, or are something else"
        with read_errors_as("these bytes can't be read as routes", cause):
            whole = np.frombuffer(data, np.uint8)
            values = decode(lambda first, end: whole[first:end], len(whole))
            return cls.of_decoded(values).check_not_constant()

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write a safetensors file, whole or not at all.

        >>> routes.save("step7.routes")

        Raises:
            RouteFileError: the file is there and `overwrite` isn't set, or it can't be written.
        """
        write_whole(Path(path), *self.to_buffers(), overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutedExperts:
        """Read a file that `save` wrote, and check it as data from outside.

        >>> routes.save("step8.routes")
        >>> npu_replay.RoutedExperts.load("step8.routes") == routes
        True

        Raises:
            RouteFileError: the file is something else, cut short or changed.
            InvalidRoutes: the routes in it are wrong.
        """
        place = Path(path)
        cause = "it was cut short, damaged, or isn't a safetensors file"
        # The file is opened once: an overwrite meanwhile puts another file in its place, which isn't read.
        with (
            read_errors_as("this file can't be read as routes", cause, place),
            plain_file(place) as file,
        ):
            return cls.of_decoded(decode(*reader(file))).check_not_constant()


_OF_MICRO_BATCH = ("placement", "shown")


def _unpickled(values: dict[str, Any]) -> RoutedExperts:
    arrays = {name: arguments.shared_tensor(values[name]) for name in ("ids", "recorded")}
    return RoutedExperts.of_checked(**values | arrays)


def without_layers() -> RoutedExperts:
    """Return the empty routes that a pipeline stage of dense layers has for a micro-batch."""
    return RoutedExperts(ids=torch.empty(0, 0, 1, dtype=torch.uint8, device="cpu"), layers=(), num_experts=1)


def _refuse(finding: Finding | None, layers: tuple[int, ...], cause: str) -> None:
    if finding is not None:
        raise finding.error(InvalidRoutes, finding.layer(layers), cause)
