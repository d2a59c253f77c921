"""Keep torch's compilers from learning the wrong names while some of torch's are replaced.

The first torch.compile of a process makes a table of torch's functions and keeps it. Made while `torch.topk`
is ours, it would lack the real one, and code compiled later would break its graph there, or fail with
fullgraph=True. So a table that was made meanwhile is dropped; dynamo makes it anew when it needs it.

TorchScript keeps such a table too, by id, and can't compile a function of ours: in it ours stands for the
operator, as long as it is torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def dynamo_knows() -> bool:
    """Has dynamo made its table already?"""
    table = _dynamo_table()
    return table is not None and bool(table.cache_info().currsize)


def dynamo_forgets() -> None:
    """Drop dynamo's table, if there is one."""
    table = _dynamo_table()
    if table is not None:
        table.cache_clear()


def _dynamo_table() -> Any:
    rules = sys.modules.get("torch._dynamo.trace_rules")  # never imported by us: that takes seconds
    table = getattr(rules, "get_torch_obj_rule_map", None)
    return table if hasattr(table, "cache_clear") and hasattr(table, "cache_info") else None


def teach_script(ours: Callable[..., Any], name: str) -> None:
    """Let TorchScript take `ours` for one of torch's operators. A table made later finds it by itself."""
    if (table := _script_table()) is not None:
        table[id(ours)] = f"aten::{name}"


def unteach_script(ours: Callable[..., Any], native: Callable[..., Any], name: str) -> None:
    """Undo that, also in a table that was made meanwhile and never saw torch's own."""
    if (table := _script_table()) is not None:
        table.pop(id(ours), None)
        table[id(native)] = f"aten::{name}"


def _script_table() -> dict[int, str] | None:
    return getattr(sys.modules.get("torch.jit._builtins"), "_builtin_table", None)
