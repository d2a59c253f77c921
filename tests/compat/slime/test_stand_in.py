"""The shim for slime on a stand-in of its one module, in every job. On slime itself: tests/on_slime."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import jobs
from on_slime.job import MOE

STAND_IN = """
import os

class RoutingReplay:
    all_routing_replays = []

    def __init__(self):
        self.clear()
        RoutingReplay.all_routing_replays.append(self)

    def clear(self):
        self.top_indices_list, self.forward_index, self.backward_index = [], 0, 0

    def record(self, ids): ...
    def pop_forward(self): ...
    def pop_backward(self): ...

    @staticmethod
    def clear_all():
        [one.clear() for one in RoutingReplay.all_routing_replays]

def set_routing_replay(replay): ...
def register_routing_replay(router): raise RuntimeError("slime's own is called")
def get_routing_replay_compute_topk(old): return old
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stand-in")
    (root / "slime" / "utils").mkdir(parents=True)
    for name, text in {"__init__": "", "utils/__init__": "", "utils/routing_replay": STAND_IN}.items():
        (root / "slime" / f"{name}.py").write_text(text)
    return root


@pytest.mark.megatron
def test_routers_ask_slimes_queues_unless_megatron_has_a_replay_of_its_own(path: Path) -> None:
    found: dict[str, Any] = jobs.run("on_slime.job:stand_in", {}, path=[path])
    folder = Path(str(find_spec("megatron.core").origin)).parent  # type: ignore[union-attr]
    if (folder / "transformer" / "moe" / "router_replay.py").is_file():
        assert found == {"replays": 0, "patches": []}
        return
    assert found["replays"] == sum(MOE)
    assert found["r2"] == {"update": True, "own": False}
    assert found["patches"] == ["get_routing_replay_compute_topk", "register_routing_replay"]


def test_another_module_of_that_name_is_refused_by_the_name_that_it_lacks(path: Path) -> None:
    from types import SimpleNamespace

    from npu_replay.compat.slime import routing_replay
    from npu_replay.errors import ReplayError

    newer = SimpleNamespace(
        __name__="slime.utils.routing_replay", RoutingReplay=type("RoutingReplay", (), {})
    )
    with pytest.raises(ReplayError, match=r"Expected RoutingReplay\.all_routing_replays, got None"):
        routing_replay._wrap(newer)
