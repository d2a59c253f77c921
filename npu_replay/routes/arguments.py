"""Checks and converts the arguments of routes: arrays, labels and sizes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, RouterError, shown, whole_number
from npu_replay.routes.checks import MAX_EXPERTS, MAX_LAYERS

IdArray: TypeAlias = "torch.Tensor | np.ndarray"

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WITHOUT_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)  # torch has these dtypes, and little more


class StageLabels(tuple[int, ...]):
    """Holds labels of MoE layers; `whole` are those of the whole model, `here` those of the rank."""

    whole: tuple[int, ...]
    here: tuple[int, ...]

    def __new__(
        cls, labels: Iterable[int], whole: Iterable[int] = (), here: Iterable[int] = ()
    ) -> StageLabels:
        made = super().__new__(cls, labels)
        made.whole = tuple(whole)
        made.here = tuple(here)
        return made

    def among(self, layers: tuple[int, ...], where: str = "") -> tuple[int, ...]:
        """Return the labels of these layers in routes labelled `layers`."""
        # Routes of another rank, or of a Hugging Face config, have other labels: the k-th is the k-th MoE
        # layer.
        if not self.whole or layers in (self, self.here):
            return self
        count = len(self.whole)
        if len(layers) != count:
            raise RouterError(
                "the routes have other MoE layers than the pattern of the model",
                where=where,
                expected=f"{count} MoE layers, one for each E, labelled {self.whole} here, or this rank's "
                "part",
                got=f"{len(layers)} MoE layers, {layers}",
                cause="another model's Hugging Face config, columns of dense layers, or another rank's part",
            )
        return tuple(layers[self.whole.index(label)] for label in self)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds numbers that can be read one by one: not sparse, nested or quantized."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def as_tensor(value: Any) -> torch.Tensor:
    """Return a tensor as it is, on its device, and anything else as a tensor on the CPU."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def on_host(value: Any) -> torch.Tensor:
    """Return a caller's value as a tensor on the CPU."""
    return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value, device="cpu").detach()


def ids(ids: Any) -> torch.Tensor:
    """Return integer ids as a CPU tensor [tokens, layers, topk], copied only if torch can't use them."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        dtype = ids.dtype.newbyteorder("=")
        if dtype in (np.uint16, np.uint32, np.uint64):
            dtype = np.dtype(np.int64)
        usable = ids.dtype == dtype and ids.flags.writeable and all(stride >= 0 for stride in ids.strides)
        tensor = torch.from_numpy(ids if usable else ids.astype(dtype))
    elif isinstance(ids, torch.Tensor) and ids.dtype in (*INTEGERS, *_WITHOUT_ARITHMETIC) and is_plain(ids):
        tensor = ids.detach().cpu()
        if tensor.dtype in _WITHOUT_ARITHMETIC:
            tensor = tensor.to(torch.int64)
    else:
        raise InvalidRoutes(
            "ids must be an array of integers",
            expected="torch.Tensor or numpy.ndarray of an integer dtype",
            got=shown(ids) if hasattr(ids, "dtype") else f"{type(ids).__name__}: {shown(ids)}",
            cause="a list: np.asarray(ids); or ids that went through a float: ids.astype(int), or ids.long() "
            "of a tensor, if they are whole numbers",
        )
    shape = list(tensor.shape)
    if tensor.dim() != 3:
        raise InvalidRoutes(
            "ids has the wrong shape",
            expected="[tokens, layers, topk]",
            got=shape,
            cause="a flat payload that wasn't reshaped, or one layer without its axis",
        )
    return tensor


def shared_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor on numpy's memory, without torch's warning if that is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def labels(layers: Any, columns: int | None = None) -> tuple[int, ...]:
    """Return a caller's layer labels as Python integers, StageLabels as they are.

    With `columns` they must be one per column, ascending and below MAX_LAYERS.
    """
    numbers: tuple[int, ...] = layers
    if not isinstance(layers, StageLabels):
        numbers = tuple(map(operator.index, layers))
    if columns is not None:
        short = str(numbers) if len(numbers) <= 8 else f"({numbers[0]}, {numbers[1]}, ..., {numbers[-1]})"
        if len(numbers) != columns:
            raise InvalidRoutes(
                "ids has more or fewer columns than layer labels",
                expected=f"{len(numbers)}, for layers {short}",
                got=columns,
                cause="an engine that reports every layer against labels of the MoE layers only, or the "
                "reverse; an array [layers, tokens, topk] in the place of [tokens, layers, topk]",
            )
        if not (
            list(numbers) == sorted({*numbers})
            and (not numbers or 0 <= numbers[0] <= numbers[-1] < MAX_LAYERS)
        ):
            raise InvalidRoutes(
                "layer labels must be ascending 0-based decoder layers, each once",
                expected=f"for example (0, 1, 2), below {MAX_LAYERS}",
                got=short,
            )
    return numbers


def mask(recorded: IdArray | None, *, tokens: int) -> torch.Tensor:
    """Return a copy of a caller's mask of the rows with a route; all rows when there is none."""
    if recorded is None:
        return torch.ones(tokens, dtype=torch.bool, device="cpu")
    rows = on_host(recorded)
    if not (rows.dtype == torch.bool and rows.shape == (tokens,)):
        raise InvalidRoutes(
            "recorded must say of each token whether it has a route",
            expected=f"bool, shape ({tokens},)",
            got=f"{rows.dtype}, shape {tuple(rows.shape)}",
        )
    return rows.clone()


def num_experts(num_experts: Any, topk: int) -> int:
    count = whole_number(num_experts, "number of experts", least=1, most=MAX_EXPERTS, kind=InvalidRoutes)
    whole_number(topk, "top-k", least=1, most=count, kind=InvalidRoutes)
    return count


def fingerprint(mark: Any) -> int | None:
    kind = InvalidRoutes
    return None if mark is None else whole_number(mark, "fingerprint", least=0, most=2**64 - 1, kind=kind)


def common(versions: Iterable[int | str | None]) -> int | str | None:
    """Return the weight version of all; None if they differ."""
    distinct = {*versions}
    return distinct.pop() if len(distinct) == 1 else None


def known_of_all(parts: Collection[Any]) -> dict[str, Any]:
    """Return the fields that several parts have together."""
    chosen = {part.from_engine for part in parts}
    return {
        "weight_version": common(part.weight_version for part in parts),
        "constant_layers_ok": all(part.constant_layers_ok for part in parts),
        "from_engine": True if True in chosen else None if None in chosen else False,
        "made_at": min((part.made_at for part in parts), default=0.0),
    }


def weight_version(version: Any) -> int | str | None:
    """Return a version that a header can hold: numpy's and torch's integers become Python's."""
    if version is None or isinstance(version, str):
        return version
    what = "weight_version that isn't text"
    return whole_number(version, what, least=-(2**63), most=2**63 - 1, kind=InvalidRoutes)
