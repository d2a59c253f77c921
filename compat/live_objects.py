"""Objects that nobody has listed: the garbage collector knows them, and takes a tenth of a second."""

from __future__ import annotations

import gc
from typing import Any


def alive(kind: type) -> list[Any]:
    """Every object of this kind, or of a kind made from it; not by isinstance, which asks proxies."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]
