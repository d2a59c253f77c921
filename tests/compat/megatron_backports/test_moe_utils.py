"""compat.moe_functions: what frameworks import from later releases gives what it gives there, bit by bit.

Compared with the releases that lie beside the one on the path, as the scripts of ci/ lay them. What each
function means by itself, and how all of it comes and goes, is in tests/matrix on every release.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_function_cases as cases
import npu_replay
from npu_replay.compat.megatron_backports import moe_utils as moe_functions
from npu_replay.errors import NoEffect

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LATER = [
    *("0.14.0", "0.16.1", "0.19.2"),
    *(pytest.param(release, marks=pytest.mark.long) for release in ("0.15.3", "0.17.1")),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    npu_replay.install()


@pytest.fixture(scope="module", params=LATER)
def later(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A later release, and what the real functions of it give."""
    if has_replay():
        pytest.skip("nothing is added here")
    release: str = request.param
    path = beside(release)
    if path is None:
        pytest.skip(f"megatron-core {release} doesn't lie beside the release on the path")
    saved = tmp_path_factory.mktemp("later") / f"{release}.pt"
    subprocess.run(
        [sys.executable, cases.__file__, str(saved)],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    return release, torch.load(saved)


def beside(release: str) -> str | None:
    """A PYTHONPATH with another release in the place of this one."""
    here = next(iter(find_spec("megatron").submodule_search_locations))  # type: ignore[union-attr, arg-type]
    folder = Path(here).parent
    other = folder.with_name(re.sub(r"\d+\.\d+\.\d+$", release, folder.name))
    if not (other / "megatron").is_dir():
        return None
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part) != folder]
    return os.pathsep.join([str(other), *filter(None, rest)])


def native(name: str) -> bool:
    """Does the source of the release on the path define it?"""
    return name in definitions(cases.FUNCTIONS[name])


def definitions(module: str) -> dict[str, ast.FunctionDef]:
    folder = Path(import_module("megatron.core").__file__ or "").parent
    file = folder.joinpath(*module.split(".")[2:]).with_suffix(".py")
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def has_replay() -> bool:
    found = definitions(moe_functions.MODULE).get("topk_routing_with_score_function")
    return found is not None and "router_replay" in [argument.arg for argument in found.args.args]


@pytest.mark.slow
def test_results_and_signatures_are_those_of_later_releases(later: tuple[str, Any]) -> None:
    release, real = later
    minor = int(release.split(".")[1])
    ours = dict(cases.results()) | dict(cases.replay_results()) | dict(cases.dense_results())
    # From 0.18 on Megatron goes to float32 first.
    compared = [name for name in real["results"] if name in ours and not ("bfloat16" in name and minor >= 18)]
    assert len(compared) > 50
    for name in compared:
        mine, theirs = ours[name], real["results"][name]
        if isinstance(mine, tuple):
            assert [one.dtype for one in mine] == [one.dtype for one in theirs], name
            assert all(map(torch.equal, mine, theirs)), name
        else:
            assert mine == theirs, name
    for name, arguments in cases.signatures().items():
        theirs = real["signatures"][name]
        if name == "topk_routing_with_score_function":
            theirs = theirs + ["router_replay=None"] * (minor < 16) + ["dense_output=False"] * (minor < 17)
        assert arguments == (theirs if minor < 16 else theirs[: len(arguments)]), name


@pytest.fixture
def moe_utils() -> Any:
    return import_module(moe_functions.MODULE)


def test_taken_off_the_function_is_the_releases_own_wherever_it_is_held(moe_utils: Any) -> None:
    name = "topk_routing_with_score_function"
    moe_functions._patches.undo()
    try:
        holders = moe_utils, import_module("megatron.core.transformer.moe.router")
        held = [vars(one)[name] for one in holders if name in vars(one)]
        assert {one.__module__ for one in held} <= {moe_functions.MODULE}
    finally:
        moe_functions.install()


def topk(**options: Any) -> Any:
    return cases.function("topk_routing_with_score_function")(cases.logits(), 2, **options)


def with_target(action: str) -> Any:
    module: Any = import_module("megatron.core.transformer.moe.router_replay")
    replay = module.RouterReplay()
    replay.set_router_replay_action(module.RouterReplayAction(action))
    replay.set_target_indices(cases.targets(2))
    return replay


def test_a_frameworks_own_way_to_choose_is_asked_without_an_action_too() -> None:
    """As upstream does in every call: the framework may know better than the action."""
    module: Any = import_module("megatron.core.transformer.moe.router_replay")
    calls: list[int] = []

    class Own(module.RouterReplay):  # type: ignore[misc]  # a class of the module above
        def get_replay_topk(self, scores: torch.Tensor, topk: int, *_: Any) -> Any:
            calls.append(topk)
            ids = cases.targets(topk)
            return scores.gather(1, ids), ids

    _, routing_map = topk(router_replay=Own())
    assert calls == [2]
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, cases.targets(2), True))


def test_a_dense_output_holds_the_chosen_experts_alone_in_the_order_of_the_top_k() -> None:
    if "dense_output" not in inspect.signature(cases.function("topk_routing_with_score_function")).parameters:
        pytest.skip("upstream's own function, of before 0.17")
    probs, ids = topk(dense_output=True, use_pre_softmax=True)
    wanted = cases.logits().softmax(1).topk(2, dim=1)
    assert torch.equal(ids, wanted.indices)
    assert torch.equal(probs, wanted.values)


def test_a_function_that_calls_no_top_k_can_not_be_replayed_in_silence(
    moe_utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native("topk_routing_with_score_function"):
        pytest.skip("the release's own function is called, whatever moe_utils holds")
    chosen = torch.ones(cases.ROWS, cases.EXPERTS, dtype=torch.bool)
    monkeypatch.setattr(moe_utils, "topk_softmax_with_capacity", lambda logits, *_, **__: (logits, chosen, 0))
    with pytest.raises(NoEffect, match="calls no top-k"):
        topk(router_replay=with_target("replay_forward"))
    with pytest.raises(NoEffect, match="no order for a dense output"):
        topk(dense_output=True)
    with pytest.raises(ValueError, match=r"came with 0\.14"):
        topk(fused=True)


def test_what_mindspeed_puts_in_the_place_of_the_releases_own_is_called(
    moe_utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fix_router replaces the function in moe_utils, before us or after."""
    if native("topk_routing_with_score_function"):
        pytest.skip("MindSpeed replaces no routing function of this release")
    asked: dict[str, Any] = {}

    def mindspeeds(logits: torch.Tensor, topk: int, **options: Any) -> tuple[str, str, str]:
        asked.update(options)
        return "probs", "map", "tokens per expert"

    monkeypatch.setattr(moe_utils, "topk_softmax_with_capacity", mindspeeds)
    assert topk(scaling_factor=2.0) == ("probs", "map")
    assert asked["scaling_factor"] == 2.0
