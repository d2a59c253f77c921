"""The shim for slime on a stand-in of its one module, in every job. On slime itself: tests/on_slime."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jobs
import npu_replay
from npu_replay.compat import probe
from npu_replay.errors import ReplayError
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


@pytest.mark.slow
@pytest.mark.megatron
def test_routers_ask_slimes_queues_unless_megatron_has_a_replay_of_its_own(path: Path) -> None:
    report: dict[str, Any] = jobs.run("on_slime.job:stand_in", {}, path=[path])
    folder = Path(str(find_spec("megatron.core").origin)).parent  # type: ignore[union-attr]
    if (folder / "transformer" / "moe" / "router_replay.py").is_file():
        assert report == {"replays": 0, "patches": []}
        return
    assert report["replays"] == sum(MOE)
    assert report["r2"] == {"update": True, "own": False}
    assert report["patches"] == ["get_routing_replay_compute_topk", "register_routing_replay"]


def test_another_module_of_that_name_is_refused_by_the_name_that_it_lacks(path: Path) -> None:
    from npu_replay.compat.slime import routing_replay

    newer = SimpleNamespace(
        __name__="slime.utils.routing_replay", RoutingReplay=type("RoutingReplay", (), {})
    )
    with pytest.raises(ReplayError, match=r"Expected RoutingReplay\.all_routing_replays, got None"):
        routing_replay._wrap(newer)


@pytest.mark.parametrize(
    ("module", "function"),
    [("sglang_utils.arguments", "validate_args"), ("megatron_utils.initialize", "init")],
)
def test_sglangs_arguments_are_checked_where_slime_is_given_them(
    module: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the driver, and in a trainer; without R3 nobody asks."""
    name = f"slime.backends.{module}"
    file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(f"def {function}(args): args.told = True")
    monkeypatch.syspath_prepend(tmp_path)
    sglang = probe.Product("sglang", True, "0.5.23", "/there")
    monkeypatch.setattr(probe, "products", lambda: (sglang,))
    npu_replay.install()
    try:
        checked = getattr(importlib.import_module(name), function)
        args = SimpleNamespace(use_rollout_routing_replay=True, sglang_enable_hierarchical_cache=True)
        with pytest.raises(
            ReplayError, match=r"slime's config, rollout: .*--sglang-enable-hierarchical-cache"
        ):
            checked(args)
        assert not hasattr(args, "told")
        for change in ({"use_rollout_routing_replay": False}, {"sglang_enable_hierarchical_cache": False}):
            other = SimpleNamespace(**vars(args) | change)
            checked(other)
            assert other.told
    finally:
        npu_replay.uninstall()
        for module in [module for module in sys.modules if module.partition(".")[0] == "slime"]:
            del sys.modules[module]
        monkeypatch.undo()
        npu_replay.install()
