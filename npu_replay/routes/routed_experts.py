"""RoutedExperts: the experts that a pass chose, labelled by layer so that they cannot shift."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, RouteFileError, listed, shown, whole_number
from npu_replay.routes import checks
from npu_replay.routes import file as route_file
from npu_replay.routes import wire as route_bytes
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS, Array, Finding
from npu_replay.routes.fingerprint import fingerprint as fingerprint_of

if TYPE_CHECKING:
    from npu_replay.routes.inputs import Inputs

IdArray: TypeAlias = "torch.Tensor | np.ndarray"

_MOST_TOKENS = 1 << 31
_OUTSIDE = (
    "ids that were narrowed on the way, a sentinel such as -1 (mark those rows with recorded=), ids of "
    "another model, or physical ids under EPLB"
)
_TWICE = (
    "rows that were never captured and are all zeros, or padding that was given expert 0: mark rows without "
    "a route with recorded="
)
_CONSTANT = (
    "the rollout engine didn't capture this layer (its buffer was never bound, or the layer is dense and its "
    "column must be dropped by label)"
)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def narrow_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that every back end computes with: uint8 up to 256 experts, int16 above."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def narrow_array_dtype(num_experts: int) -> np.dtype[Any]:
    """The same for numpy's arrays."""
    return np.dtype(np.uint8 if narrow_dtype(num_experts) is torch.uint8 else np.int16)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RoutedExperts:
    """The expert ids that one pass chose for some tokens.

    Building one checks it: the shape, the range of every id and that no recorded row names an expert
    twice in a layer.

    Args:
        ids: [tokens, layers, topk], torch or numpy, any integer dtype; kept as a CPU tensor, uint8 up to
            256 experts and int16 above. Logical expert ids, before any EPLB mapping.
        layers: one global 0-based decoder-layer index a column, ascending.
        num_experts: routed experts of a layer, up to 32,767.
        recorded: [tokens] bool, the rows that carry a route; all of them when not given. The ids of
            other rows are stored as 0 and never looked at: such a row takes the router's own choice.
        fingerprint: `npu_replay.fingerprint` of the sequence, if this is one sequence.
        weight_version: which weights chose, if known.

    Raises:
        InvalidRoutes: naming the layer, the number of rows and the usual cause.
    """

    ids: torch.Tensor
    layers: tuple[int, ...]
    num_experts: int
    recorded: torch.Tensor
    fingerprint: int | None
    weight_version: int | str | None

    bad_samples: ClassVar[int] = 0
    """Sequences in it whose routes couldn't be used; `TokenLayout.gather` says so of what it returns."""
    row_order: ClassVar[str | None] = None
    """How [batch, sequence] became its rows, "sequence" or "batch", where `TokenLayout.gather` knows."""
    inputs: ClassVar[Inputs | None] = None
    """The tokens of its micro-batch; `record` and `TokenLayout.gather` say so. Like what is above it goes
    into a pickle, and not into bytes or files."""
    vouched: ClassVar[bool] = False
    """Is it known that a layer which is the same in all rows is right? Where the trainer's own router chose
    so, or the door saw the tokens. It goes wherever they go, through files and bytes too."""

    def __init__(
        self,
        *,
        ids: IdArray,
        layers: Sequence[int],
        num_experts: int,
        recorded: IdArray | None = None,
        fingerprint: int | None = None,
        weight_version: int | str | None = None,
    ) -> None:
        self._fill(ids, layers, num_experts, recorded, fingerprint, weight_version, copy=True)

    def _fill(
        self,
        ids: IdArray,
        layers: Sequence[int],
        num_experts: int,
        recorded: IdArray | None,
        fingerprint: int | None,
        weight_version: int | str | None,
        *,
        copy: bool,
        vouched: bool = False,
    ) -> None:
        wide = _integer_tensor(ids)
        labels = _checked_labels(layers, columns=wide.shape[1])
        rows = _checked_recorded(recorded, tokens=wide.shape[0])
        num_experts = _checked_sizes(num_experts, topk=wide.shape[2])
        _refuse(checks.find_outside(wide.numpy(), num_experts, rows.numpy()), labels, _OUTSIDE)
        narrow = wide.to(narrow_dtype(num_experts))
        if bool(narrow[~rows].any()):
            narrow = narrow.masked_fill(~rows[:, None, None], 0)
        _refuse(checks.find_twice(narrow.numpy(), rows.numpy()), labels, _TWICE)
        if copy and narrow.data_ptr() == wide.data_ptr():
            narrow = narrow.clone()  # frozen: what the caller does to his array later must not show here
        mark, version = _checked_fingerprint(fingerprint), _checked_version(weight_version)
        self._set(narrow.contiguous(), labels, num_experts, rows, mark, version, vouched=vouched)

    def _about(self, **known: object) -> None:
        """Say something of a whole micro-batch's routes."""
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def _set(self, *values: object, vouched: bool) -> None:
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)
        if vouched:
            object.__setattr__(self, "vouched", True)

    @classmethod
    def _adopt(
        cls,
        ids: torch.Tensor,
        layers: Sequence[int],
        num_experts: int,
        recorded: torch.Tensor | None = None,
        fingerprint: int | None = None,
        weight_version: int | str | None = None,
        vouched: bool = False,
    ) -> RoutedExperts:
        """Build one around an array that nobody else will write to, with every check and no copy."""
        routes = cls.__new__(cls)
        routes._fill(
            ids, layers, num_experts, recorded, fingerprint, weight_version, copy=False, vouched=vouched
        )
        return routes

    @classmethod
    def _checked(
        cls,
        *,
        ids: torch.Tensor,
        layers: tuple[int, ...],
        num_experts: int,
        recorded: torch.Tensor,
        tokens: Array,
        weight_version: int | str | None,
    ) -> RoutedExperts:
        """Build one of these tokens' narrow ids, checked just now, with zeros in rows without a route."""
        routes = cls.__new__(cls)
        _checked_sizes(num_experts, topk=ids.shape[2])
        constant = checks.constant_layers(ids.numpy(), recorded.numpy(), num_experts, tokens)
        version, mark = _checked_version(weight_version), fingerprint_of(tokens)
        routes._set(ids, layers, num_experts, recorded, mark, version, vouched=not len(constant))
        return routes

    @property
    def topk(self) -> int:
        """Experts a token in a layer."""
        return self.ids.shape[2]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __repr__(self) -> str:
        missing = len(self) - int(self.recorded.sum())
        return (
            f"RoutedExperts({len(self)} tokens, {len(self.layers)} layers, top-{self.topk} of "
            f"{self.num_experts}, {missing} rows without a route)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return (
            (self.layers, self.num_experts, self.fingerprint, self.weight_version)
            == (other.layers, other.num_experts, other.fingerprint, other.weight_version)
            and torch.equal(self.ids, other.ids)
            and torch.equal(self.recorded, other.recorded)
        )

    __hash__ = None  # type: ignore[assignment]

    def layer_ids(self, layer: int) -> torch.Tensor:
        """The ids of one decoder layer, [tokens, topk], narrow dtype."""
        return self.ids[:, self._columns(_whole_labels([layer]))][:, 0]

    def take(self, rows: torch.Tensor | np.ndarray | Sequence[int]) -> RoutedExperts:
        """Return the routes at these rows, in this order.

        Args:
            rows: integers, [n]; a negative one makes a row without a route (padding, say). Or a bool
                mask, [tokens].

        The result is another sequence, so it carries no fingerprint.
        """
        try:
            index = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows).cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidRoutes(
                "take() was asked for what are no rows", expected="integers, or a bool mask", got=shown(rows)
            ) from error
        if not is_plain(index):
            raise InvalidRoutes("take() takes a plain tensor", expected="integers, [n]", got=shown(index))
        if index.numel() and index.dtype not in (torch.bool, *_INTEGERS):
            raise InvalidRoutes(
                "take() was asked for rows that are no integers",
                expected="integers, or a bool mask",
                got=index.dtype,
            )
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise InvalidRoutes(
                    "the mask has the wrong shape", expected=(len(self),), got=tuple(index.shape)
                )
            index = index.nonzero()[:, 0]
        index = index.to(torch.int64)
        if index.dim() != 1 or (index.numel() and int(index.max()) >= len(self)):
            raise InvalidRoutes(
                "take() was asked for rows that aren't there",
                expected=f"a flat list of rows below {len(self)}",
                got=f"shape {tuple(index.shape)}, largest {int(index.max()) if index.numel() else '-'}",
                cause="the routes of another sequence, or a layout made for other lengths",
            )
        if len(self) == 0:
            ids = self.ids.new_zeros((len(index), *self.ids.shape[1:]))
            return self._derived(ids, torch.zeros(len(index), dtype=torch.bool), self.weight_version)
        # numpy's take copies a whole row at a time; clipped, a negative row reads row 0 and is blanked below.
        at = index.numpy()
        rows = np.take(self.ids.numpy().reshape(len(self), -1), at, axis=0, mode="clip")
        recorded = torch.from_numpy(np.take(self.recorded.numpy(), at, mode="clip"))
        ids = torch.from_numpy(rows).view(len(index), *self.ids.shape[1:])
        missing = index < 0
        if bool(missing.any()):
            ids[missing] = 0
            recorded &= ~missing
        return self._derived(ids, recorded, self.weight_version)

    @classmethod
    def concat(cls, parts: Sequence[RoutedExperts], layers: Sequence[int] | None = None) -> RoutedExperts:
        """Put the rows of several RoutedExperts one after the other.

        The weight version stays where all parts agree on it; the fingerprint doesn't.

        Args:
            parts: all of the same top-k and number of experts.
            layers: only these decoder layers, ascending, which every part has to have; when not given, all of
                them, which then have to be the same in every part.
        """
        parts = listed(parts, "the parts of concat()")
        if not parts or not all(isinstance(part, RoutedExperts) for part in parts):
            raise InvalidRoutes(
                "concat() needs at least one RoutedExperts, and nothing else",
                expected=">= 1",
                got=[type(part).__name__ for part in parts] or 0,
            )
        first = parts[0]
        alike = ("num_experts", "topk") if layers is not None else ("layers", "num_experts", "topk")
        for number, part in enumerate(parts):
            for what in alike:
                if getattr(part, what) != getattr(first, what):
                    raise InvalidRoutes(
                        f"part {number} of concat() has other {what}",
                        expected=getattr(first, what),
                        got=getattr(part, what),
                        cause="routes of different models, or of engines that report other columns",
                    )
        labels = first.layers if layers is None else _whole_labels(layers)
        columns = {of: part._columns(labels) for of, part in {part.layers: part for part in parts}.items()}
        versions = {part.weight_version for part in parts}
        return first._derived(
            torch.cat([part.ids[:, columns[part.layers]] for part in parts]),
            torch.cat([part.recorded for part in parts]),
            versions.pop() if len(versions) == 1 else None,
            layers=labels,
            vouched=all(part.vouched for part in parts),
        )

    @classmethod
    def unrecorded(cls, tokens: int, *, layers: Sequence[int], topk: int, num_experts: int) -> RoutedExperts:
        """Routes of a sample that has none: no row is recorded, so the router chooses for all of them."""
        num_experts = _checked_sizes(num_experts, topk=whole_number(topk, "topk"))
        layers, tokens = (
            listed(layers, "layers", most=MAX_LAYERS),
            whole_number(tokens, "the number of tokens"),
        )
        if not 0 <= tokens <= _MOST_TOKENS:
            raise InvalidRoutes("bad number of tokens", expected=f"0 to {_MOST_TOKENS}", got=tokens)
        ids = torch.zeros(tokens, len(layers), topk, dtype=narrow_dtype(num_experts))
        none = torch.zeros(tokens, dtype=torch.bool)
        return cls._adopt(ids, layers, num_experts, recorded=none, vouched=True)

    def only(self, layers: Sequence[int]) -> RoutedExperts:
        """Return the routes of these decoder layers, ascending.

        Raises:
            InvalidRoutes: one of them isn't here.
        """
        labels = _whole_labels(layers)
        ids = self.ids[:, self._columns(labels)]
        return self._derived(
            ids, self.recorded, self.weight_version, layers=labels, fingerprint=self.fingerprint
        )

    def _columns(self, labels: tuple[int, ...]) -> slice | list[int]:
        """The columns of these layers; a slice, which copies nothing, where they are neighbours."""
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
        rows = slice(whole_number(first, "the first row"), whole_number(end, "the end"))
        mark = _checked_fingerprint(fingerprint)
        return self._derived(self.ids[rows], self.recorded[rows], self.weight_version, fingerprint=mark)

    def _derived(
        self,
        ids: torch.Tensor,
        recorded: torch.Tensor,
        weight_version: int | str | None,
        *,
        layers: tuple[int, ...] | None = None,
        fingerprint: int | None = None,
        vouched: bool | None = None,
    ) -> RoutedExperts:
        """Rows and columns of ours, which were checked when they came in."""
        routes = RoutedExperts.__new__(RoutedExperts)
        routes._set(
            ids,
            self.layers if layers is None else layers,
            self.num_experts,
            recorded,
            fingerprint,
            weight_version,
            vouched=self.vouched if vouched is None else vouched,
        )
        return routes

    def check_not_constant(self, tokens: Array | None = None) -> RoutedExperts:
        """Refuse a layer that is the same in all recorded rows, 64 or more, of different tokens; return self.

        For routes from outside: it is how rollout engines fail in silence (all zeros, a stale buffer).

        Args:
            tokens: [tokens], their ids; without them each counts as another, unless the routes are `vouched`.
        """
        if not self.vouched:
            ids, rows = self.ids.numpy(), self.recorded.numpy()
            found = checks.find_constant(ids, rows, self.num_experts, tokens)
            _refuse(found, self.layers, _CONSTANT)
        return self

    def to_bytes(self) -> bytes:
        """Return a byte string that says everything about itself, for the wire."""
        return b"".join(self.to_buffers())

    def to_buffers(self) -> tuple[bytes, memoryview, bytes]:
        """Return `to_bytes` in three pieces, the ids not copied: for `writelines` of a file or a socket."""
        return route_bytes.pieces(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's arrays go out of band where the pickler can do that (protocol 5): Ray copies the ids neither
        # when it stores them nor when it reads them.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: values[name].contiguous().numpy() for name in ("ids", "recorded")}
        known = {name: found for name in _ABOUT if (found := vars(self).get(name)) is not None}
        return _unpickled, (values | arrays, known)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RoutedExperts:
        """Read what `to_bytes` made, without copying the ids, and check it as data from outside.

        The ids lie in `data`: a bytearray, or a map of a file, may not be written to while they are used.

        Raises:
            RouteFileError: the bytes are foreign, cut short or changed.
            InvalidRoutes: the routes in it are wrong.
        """
        return cls._adopt(**route_bytes.parse(data)).check_not_constant()

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write a safetensors file, whole or not at all. Needs `pip install npu-replay[files]`.

        Raises:
            RouteFileError: the file is there and `overwrite` isn't set, or it can't be written.
        """
        route_file.save(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutedExperts:
        """Read what `save` wrote, and check it as data from outside.

        Raises:
            RouteFileError: the file is foreign, cut short or changed.
            InvalidRoutes: the routes in it are wrong.
        """
        arguments = route_file.parse(path)
        try:
            return cls._adopt(**arguments).check_not_constant()
        except InvalidRoutes as error:
            raise error.at(path) from None


_ABOUT = ("bad_samples", "vouched", "row_order", "inputs")


def _unpickled(values: dict[str, Any], about: dict[str, Any]) -> RoutedExperts:
    arrays = {name: route_bytes.shared_tensor(values[name]) for name in ("ids", "recorded")}
    routes, known = RoutedExperts.__new__(RoutedExperts), values | arrays
    if known.keys() != {field.name for field in fields(RoutedExperts)}:
        raise RouteFileError(
            "this pickle is of another version of npu_replay",
            expected="one version on all nodes",
            got=list(known),
        )
    routes._set(*(known[field.name] for field in fields(RoutedExperts)), vouched=False)
    routes._about(**about)
    return routes


def without_layers() -> RoutedExperts:
    """What a pipeline stage of dense layers has to say of a micro-batch: nothing."""
    return RoutedExperts(ids=torch.empty(0, 0, 1, dtype=torch.uint8), layers=(), num_experts=1)


def _integer_tensor(ids: IdArray) -> torch.Tensor:
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise InvalidRoutes("ids must be integers", expected="an integer dtype", got=ids.dtype)
        dtype = ids.dtype.newbyteorder("=")
        if dtype in (np.uint16, np.uint32, np.uint64):
            dtype = np.dtype(np.int64)  # torch has these dtypes, but no arithmetic on them
        usable = ids.dtype == dtype and ids.flags.writeable and all(stride >= 0 for stride in ids.strides)
        tensor = torch.from_numpy(ids if usable else ids.astype(dtype))
    elif isinstance(ids, torch.Tensor):
        if ids.dtype not in _INTEGERS or not is_plain(ids):
            raise InvalidRoutes(
                "ids must be integers",
                expected="an integer dtype",
                got=f"{ids.dtype}, {ids.layout}, {ids.device}",
            )
        tensor = ids.detach().cpu()
    else:
        raise InvalidRoutes("ids must be an array", expected="torch.Tensor or numpy.ndarray", got=type(ids))
    if tensor.dim() != 3:
        raise InvalidRoutes(
            "ids has the wrong shape",
            expected="[tokens, layers, topk]",
            got=list(tensor.shape),
            cause="a flat payload that wasn't reshaped, or one layer without its axis",
        )
    return tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Does it hold numbers that can be looked at one by one?"""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def _whole_labels(layers: Any) -> tuple[int, ...]:
    return tuple(whole_number(layer, "a layer") for layer in listed(layers, "the layers"))


def _checked_labels(layers: Sequence[int], *, columns: int) -> tuple[int, ...]:
    try:
        labels = tuple(operator.index(layer) for layer in layers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRoutes(
            "layer labels must be integers", expected="for example (0, 1, 2)", got=shown(layers)
        ) from error
    if len(labels) != columns:
        raise InvalidRoutes(
            "ids has another number of columns than there are layer labels",
            expected=f"{len(labels)} columns for layers {_short(labels)}",
            got=columns,
            cause="an engine that reports every layer against labels of the MoE layers only, or the reverse",
        )
    if any(not 0 <= label < MAX_LAYERS for label in labels) or any(a >= b for a, b in pairwise(labels)):
        raise InvalidRoutes(
            "layer labels must be ascending 0-based decoder layers, each once",
            expected=f"for example (0, 1, 2), below {MAX_LAYERS}",
            got=_short(labels),
        )
    return labels


def _checked_recorded(recorded: IdArray | None, *, tokens: int) -> torch.Tensor:
    if recorded is None:
        return torch.ones(tokens, dtype=torch.bool)
    try:
        rows = torch.as_tensor(np.array(recorded) if isinstance(recorded, np.ndarray) else recorded)
        rows = rows.detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRoutes(
            "recorded isn't a mask", expected="bool, [tokens]", got=shown(recorded)
        ) from error
    if not is_plain(rows) or rows.dtype != torch.bool or rows.shape != (tokens,):
        raise InvalidRoutes(
            "recorded must say of each token whether it has a route",
            expected=f"bool, shape ({tokens},)",
            got=f"{rows.dtype}, shape {tuple(rows.shape)}" if is_plain(rows) else shown(rows),
        )
    return rows.clone()


def _checked_sizes(num_experts: object, *, topk: int) -> int:
    count = _integer(num_experts)
    if count is None or not 1 <= count <= MAX_EXPERTS:
        raise InvalidRoutes("bad number of experts", expected=f"1 to {MAX_EXPERTS}", got=num_experts)
    if not 1 <= topk <= count:
        raise InvalidRoutes("bad top-k", expected=f"1 to {count} experts a token", got=topk)
    return count


def _checked_fingerprint(fingerprint: object) -> int | None:
    if fingerprint is None:
        return None
    number = _integer(fingerprint)
    if number is None or not 0 <= number < 2**64:
        raise InvalidRoutes("bad fingerprint", expected="an unsigned 64-bit integer", got=fingerprint)
    return number


def _checked_version(weight_version: object) -> int | str | None:
    """It has to go into a header: numpy's and torch's integers become Python's."""
    if weight_version is None or isinstance(weight_version, str):
        return weight_version
    number = _integer(weight_version)
    if number is None or not -(2**63) <= number < 2**63:
        raise InvalidRoutes(
            "bad weight_version", expected="a 64-bit integer or a string", got=shown(weight_version)
        )
    return number


def _integer(value: object) -> int | None:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _refuse(found: Finding | None, layers: tuple[int, ...], cause: str) -> None:
    if found is not None:
        where = "" if found.column is None else f"layer {layers[found.column]}"
        raise InvalidRoutes(found.problem, where=where, expected=found.expected, got=found.got, cause=cause)


def _short(labels: tuple[int, ...]) -> str:
    return str(labels) if len(labels) <= 8 else f"({labels[0]}, {labels[1]}, ..., {labels[-1]})"
