"""Which checkpoint is open, on a torch that tells its saved-tensor hooks and on one that doesn't (2.7)."""

from __future__ import annotations

import sys
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from npu_replay.sessions import backward
from toys import SAVED_TENSOR_HOOKS


@pytest.fixture(params=SAVED_TENSOR_HOOKS, autouse=True)
def torch_tells_its_hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "hooks not told":
        monkeypatch.setattr(backward, "_top_hooks", None)
    elif backward._top_hooks is None:
        pytest.skip("this torch doesn't tell its saved-tensor hooks")


def innermost() -> Any:
    return next(iter(backward.enclosing(functions=False)), None)


def test_a_region_is_that_of_the_innermost_checkpoint() -> None:
    seen: dict[str, Any] = {}

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen["inner"] = innermost()
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen["before"] = innermost()
        x = checkpoint(inner, x.cos(), use_reentrant=False)
        seen["after"] = innermost()
        return x.exp()

    output = checkpoint(outer, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert innermost() is None
    assert seen["before"] is seen["after"]
    assert len({id(region) for region in (None, seen["before"], seen["inner"])}) == 3
    del output


@pytest.mark.parametrize("ends", ["backward", "the graph goes"])
def test_a_region_is_alive_as_long_as_it_may_have_to_recompute(ends: str) -> None:
    regions: list[weakref.ref[Any]] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not backward.in_backward():
            regions.append(weakref.ref(innermost()))
        return x.sin()

    output = checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert regions[0]() is not None
    if ends == "backward":
        output.sum().backward()
    del output
    assert regions[0]() is None


def test_the_region_that_recomputes_is_the_one_that_was_open() -> None:
    opened: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if backward.in_backward():
            assert backward.recomputing() == [opened[-1]]
        opened.append(innermost() if not opened else opened[0])
        return x.sin()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(opened) == 2


def test_a_reentrant_checkpoint_has_no_region() -> None:
    seen: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(innermost())
        return x.sin()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert seen == [None]


def test_the_autograd_facts_hold_either_way() -> None:
    backward.probe.cache_clear()
    assert backward.probe() is None


def test_what_fails_in_the_attempt_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that torch imports for a checkpoint may be broken; that is no fault of torch's."""
    broken = tmp_path / "triton_of_another_build.py"
    broken.write_text("def get():\n    raise ImportError('no symbol _ZN in libtriton.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, broken.stem, raising=False)
    monkeypatch.setattr(backward, "checkpoint", lambda *_, **__: import_module(broken.stem).get())
    backward.probe.cache_clear()
    try:
        said = backward.probe()
    finally:
        backward.probe.cache_clear()
    assert said == f"ImportError: no symbol _ZN in libtriton.so, raised in {broken}, line 2"
