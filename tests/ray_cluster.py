"""Two nodes of a real Ray on this machine, each with an object store of its own, and what runs on them."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
import torch
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster

from npu_replay import DecoderLayers, ParallelLayout, RoutedExperts, delivery
from npu_replay.compat.ray import RayCarrier
from npu_replay.errors import InvalidRoutes

STORE = 120 * 2**20
STARTED_AFTER = 300.0  # seconds at most: each process imports torch, on a machine that may run other tests
LAYERS = 48
TOPK = 8
EXPERTS = 128
WHOLE = ParallelLayout(tp=2, pp=2, decoder=DecoderLayers(LAYERS))


def made(seed: int, tokens: int) -> RoutedExperts:
    """The same routes of a seed in every process."""
    places = np.random.default_rng(seed).integers(0, EXPERTS // TOPK, (tokens, LAYERS, TOPK), np.uint8)
    ids = torch.from_numpy(places * TOPK + np.arange(TOPK, dtype=np.uint8))
    return RoutedExperts(ids=ids, layers=range(LAYERS), num_experts=EXPERTS, fingerprint=seed)


def digest(routes: RoutedExperts) -> tuple[int | None, tuple[int, ...], str]:
    """What tells routes apart, without the ids."""
    return routes.fingerprint, routes.layers, hashlib.blake2b(routes.ids.contiguous().numpy()).hexdigest()


@ray.remote(num_cpus=0)
class Putter:
    """A worker of the rollout."""

    def put(self, seeds: list[int], tokens: int) -> list[delivery.Reference]:
        return RayCarrier(cut=WHOLE).put_all([made(seed, tokens) for seed in seeds])

    def passed_on(self, references: Any, order: list[int]) -> Any:
        """Split, reordered, repeated and joined, as a batch is on its way."""
        parts = np.array_split(np.array(references, dtype=object), 3)
        return np.concatenate([part[:2] for part in parts] + [part[2:] for part in parts])[order]


@ray.remote(num_cpus=0)
class Rank:
    """A rank of the training."""

    def __init__(self, pp_rank: int) -> None:
        self.kept: list[RoutedExperts | None] = []
        self.layout = ParallelLayout(pp=2, pp_rank=pp_rank, decoder=WHOLE.decoder)

    def fetch(self, references: Any, patience: float = 60.0) -> Any:
        """Digests of what was fetched, or what the error says and after how many seconds."""
        begun = time.monotonic()
        try:
            self.kept = got = delivery.fetch(references, self.layout, patience=patience)
        except InvalidRoutes as error:
            return str(error), time.monotonic() - begun
        return [digest(sample) for sample in got if sample is not None]

    def drop(self) -> None:
        """The step is over."""
        self.kept = []


class Machine:
    """Both nodes, "a" and "b"; a node has the two ranks of a stage, which have the same samples."""

    def __init__(self, cluster: Cluster) -> None:
        def node(name: str) -> dict[str, Any]:
            return {"num_cpus": 4, "object_store_memory": STORE, "resources": {name: 1000}}

        self.cluster = cluster
        head = cluster.add_node(**node("a"), include_dashboard=False)
        self.nodes = {"a": head, "b": cluster.add_node(**node("b"))}
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.stages = [0, 0, 1, 1]
        self.ranks = [self.on("ab"[stage], Rank, stage) for stage in self.stages]
        ray.get([rank.__ray_ready__.remote() for rank in self.ranks], timeout=STARTED_AFTER)

    @staticmethod
    def on(node: str, actor: Any, *args: Any) -> Any:
        return actor.options(resources={node: 1}).remote(*args)

    @contextlib.contextmanager
    def added(self, name: str) -> Iterator[Callable[[], None]]:
        """Another node for the block, and what makes an end of it."""
        node = self.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, resources={name: 1000})
        lost: list[None] = []

        def lose() -> None:
            lost.append(self.cluster.remove_node(node, allow_graceful=False))

        try:
            yield lose
        finally:
            if not lost:
                lose()

    def fetched(self, references: Any, patience: float = 60.0) -> list[Any]:
        """What each rank fetched."""
        return ray.get([rank.fetch.remote(references, patience) for rank in self.ranks], timeout=90)  # type: ignore[no-any-return]

    def drop(self) -> None:
        """The step is over on all ranks."""
        ray.get([rank.drop.remote() for rank in self.ranks])

    def resident(self) -> dict[str, int]:
        """The most that each node's object store had in memory so far, copies from other nodes too."""
        stores = {name: node.all_processes["raylet"][0].process.pid for name, node in self.nodes.items()}
        return {name: _shared_memory(pid) for name, pid in stores.items()}

    def held(self) -> dict[str, int]:
        """Bytes of what was put on each node and isn't freed, by Ray's own count."""
        free = available_resources_per_node()
        total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        return {
            name: int(total[node.node_id]["object_store_memory"] - free[node.node_id]["object_store_memory"])
            for name, node in self.nodes.items()
            if node.node_id in total
        }

    def settled(self, fine: Callable[[dict[str, int]], bool], seconds: float = 20) -> dict[str, int]:
        """What the stores hold once it is as it should be, or after so many seconds."""
        until = time.monotonic() + seconds
        while not fine(sizes := self.held()) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.2)
        return sizes


def _shared_memory(pid: int) -> int:
    """Bytes of the shared files of a process that have pages."""
    files = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "/plasma" in os.readlink(descriptor):
                status = os.stat(descriptor)
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """A cluster that nobody else finds, and that leaves nothing."""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (
        # A socket's path may not be long.
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, RAY_TMPDIR=folder, OMP_NUM_THREADS="1", PYTHONPATH=paths),
    ):
        os.environ.pop("RAY_ADDRESS", None)
        cluster = Cluster()
        try:
            yield Machine(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
