"""Parse JSON from other sources strictly."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """Parse a JSON text; raise ValueError if it is invalid, too deeply nested, or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return parsed
