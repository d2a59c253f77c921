"""Checks that a product has the names that a shim wraps or calls, or raises an error with the missing one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import reduce
from typing import Any

from npu_replay.errors import ReplayError, shown


def check(module: Any, needed: Mapping[str, tuple[str, ...]], what: str, product: str) -> None:
    """Refuse a module that lacks a name, or a function whose arguments are missing or reordered.

    Args:
        needed: by name in the module, "Class.method" too, the arguments that a function has at least.
    """
    for name, arguments in needed.items():
        member = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), module)
        known = tuple(inspect.signature(member).parameters) if arguments and callable(member) else ()
        if member is None or [argument for argument in known if argument in arguments] != [*arguments]:
            raise unknown(
                what,
                module.__name__,
                f"{name}({', '.join(arguments)})" if arguments else name,
                f"({', '.join(known)})" if known else shown(member),
                product,
            )


def unknown(what: str, where: str, expected: str, got: str, product: str) -> ReplayError:
    """Return the error for a part of a product that npu_replay doesn't know."""
    return ReplayError(
        f"this {what} is another than npu_replay knows",
        where=where,
        expected=expected,
        got=got,
        cause=f"another release of {product}; update npu_replay, or turn it off with NPU_REPLAY_DISABLE=on",
    )
