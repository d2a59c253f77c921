"""One process puts routes into Ray's object store, another reads them twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

import npu_replay


def made() -> npu_replay.RoutedExperts:
    """Some 8 MB of routes, the same in each process."""
    generator = np.random.default_rng(0)
    some = np.argsort(generator.random((1024, 128)), axis=1)[:, :8]
    ids = some[generator.integers(0, 1024, (20_000, 48))]
    recorded = np.arange(20_000) < 19_999
    return npu_replay.RoutedExperts(
        ids=ids,
        layers=tuple(range(48)),
        num_experts=128,
        recorded=recorded,
        fingerprint=7,
        weight_version="step 3",
    )


@ray.remote
def read(boxed: list[Any]) -> dict[str, bool]:
    first, second = ray.get(boxed[0]), ray.get(boxed[0])
    memory = np.frombuffer(first.to_buffers()[1], np.uint8)
    some = first.take([0, 5, -1])
    return {
        "equal": first == made() and second == made(),
        "shared": first.ids.data_ptr() == second.ids.data_ptr() == memory.ctypes.data,
        "taken": bool((some.ids[1] == made().ids[5]).all()) and not bool(some.recorded[2]),
    }


def main(task: dict[str, Any]) -> dict[str, bool]:
    ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
    routes = ray.put(made())
    answer: dict[str, bool] = ray.get(read.remote([routes]))
    ray.shutdown()
    return answer
