"""The arguments that a rollout with vLLM is planned with, read: by their Python names or off a command line.

One that is checked and can't be read is refused by its name: taken for its default, it would slip past the
checks.

Probes: nothing. Offers: `read`, `count`, `as_mapping`. Nothing to undo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from npu_replay.compat.vllm.faults import SWITCH
from npu_replay.errors import ReplayError, whole_number

_SHORT = {
    "-pp": "pipeline_parallel_size",
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-q": "quantization",
    "-sc": "speculative_config",
}


def read(planned: Mapping[str, Any]) -> dict[str, Any]:
    """The planned arguments by their Python names, those that are checked as what they mean.

    Args:
        planned: by name, "enable_eplb", "enable-eplb" or "--enable-eplb"; `no_enable_eplb=True` is
            `enable_eplb=False`. True and numbers may be text.

    Raises:
        ReplayError: names the argument that can't be read, or is there twice.
    """
    found: dict[str, Any] = {}
    for written, said in planned.items():
        name, value = _named(written, said)
        if name in found and found[name] is not None and value is not None and found[name] != value:
            raise _unreadable(written, "each argument once", f"{found[name]!r} and {value!r}")
        if found.get(name) is None:
            found[name] = value
    return found


def _named(written: Any, value: Any) -> tuple[str, Any]:
    if not isinstance(written, str):
        raise _unreadable(repr(written), "names as text", type(written).__name__)
    name = _SHORT.get(written) or written.removeprefix("--").replace("-", "_")
    if not name or name.startswith("_"):
        raise _unreadable(written, "its Python name, or its long option", repr(written))
    head, dot, _ = name.partition(".")
    if dot and head in _KINDS:
        raise _unreadable(written, "its keys together, as a dict or as JSON", repr(written))
    if name.startswith("no_"):
        off = _flag(written, value)
        return name.removeprefix("no_"), False if off else None
    kind = _KINDS.get(name)
    return name, value if value is None or kind is None else kind(written, value)


# ---- what arguments are


def _flag(name: str, value: Any) -> bool | None:
    said = value.lower() if isinstance(value, str) else value
    known = {"true": True, "false": False, True: True, False: False, None: None}
    if isinstance(said, (bool, str, type(None))) and said in known:
        return known[said]
    raise _unreadable(name, "True or False", repr(value))


def _number(name: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or (number := whole_number(number, name, where="rollout")) < 1:
        raise _unreadable(name, "a whole number from 1 on", repr(value))
    return number


def _size(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unreadable(name, "a number", repr(value)) from error


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _unreadable(name, "text", repr(value))


def _keys(name: str, value: Any) -> Any:
    """As it came: a dict, JSON of one, or vLLM's own object."""
    if isinstance(value, str):
        try:
            readable = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            readable = False
    else:
        readable = isinstance(value, Mapping) or hasattr(value, "__dict__")
    if readable:
        return value
    raise _unreadable(name, "a dict, JSON of one, or vLLM's own object", repr(value)[:80])


_KINDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        (SWITCH, "enable_eplb", "enable_expert_parallel", "enable_prefix_caching", "async_scheduling"), _flag
    ),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "nnodes",
        ),
        _number,
    ),
    **dict.fromkeys(("runner", "moe_backend", "quantization"), _text),
    **dict.fromkeys(("kv_transfer_config", "speculative_config"), _keys),
    "kv_offloading_size": _size,
}


def _unreadable(name: str, expected: str, got: str) -> ReplayError:
    return ReplayError(
        f"the argument {name} can't be read, so it can't be checked",
        where="rollout",
        expected=expected,
        got=got,
    )


# ---- of those that were read


def count(value: Any) -> int:
    """A number of ranks; 1 where none is given."""
    return 1 if value is None else int(value)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """An argument of several keys as a mapping: given as one, as JSON, or as vLLM's own config object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): one for key, one in value.items()}
    return getattr(value, "__dict__", {})
