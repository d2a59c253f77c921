"""Routes in Ray's own object store, on their way from a rollout worker to a trainer's."""

from __future__ import annotations

import jobs


def test_workers_read_routes_where_they_lie() -> None:
    """No copy: two reads of one object are the same memory."""
    answer = jobs.run("on_verl.ray_store_worker:main", fresh=True, timeout=580)
    assert answer == {"equal": True, "shared": True, "taken": True}
