"""Keep dynamo from learning torch's names while some of them are replaced.

The first torch.compile of a process makes a table of torch's functions and keeps it. Made while `torch.topk`
is ours, it would lack the real one, and code compiled later would break its graph there, or fail with
fullgraph=True. So a table that was made meanwhile is dropped; dynamo makes it anew when it needs it.
"""

from __future__ import annotations

import sys
from typing import Any


def known() -> bool:
    """Has dynamo made its table already?"""
    table = _table()
    return table is not None and bool(table.cache_info().currsize)


def forget() -> None:
    """Drop dynamo's table, if there is one."""
    table = _table()
    if table is not None:
        table.cache_clear()


def _table() -> Any:
    rules = sys.modules.get("torch._dynamo.trace_rules")  # never imported by us: that takes seconds
    table = getattr(rules, "get_torch_obj_rule_map", None)
    return table if hasattr(table, "cache_clear") and hasattr(table, "cache_info") else None
