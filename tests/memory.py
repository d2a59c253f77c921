"""How much memory a test's process has of its own."""

from __future__ import annotations

from pathlib import Path


def own_memory() -> int:
    """Bytes of this process that it shares with nobody."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
