"""Routes in Ray's own object store, on their way from a rollout worker to a trainer's."""

from __future__ import annotations

from typing import Any


def test_workers_read_routes_where_they_lie(run_child: Any) -> None:
    """No copy: two reads of one object are the same memory."""
    answer = run_child("ray_store_worker.py").answer
    assert answer == {"equal": True, "shared": True, "taken": True}
