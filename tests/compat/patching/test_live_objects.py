"""Live objects of a class, asked of the garbage collector."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch import nn

from npu_replay.compat.patching.live_objects import alive


class Router(nn.Module):
    pass


class Narrow(Router):
    pass


def test_instances_of_the_class_and_of_those_below_it_are_found() -> None:
    made = [Router(), Narrow(), nn.Linear(1, 1)]
    assert {id(one) for one in alive(Router)} == {id(one) for one in made[:2]}


def test_many_classes_below_it_are_found_as_well() -> None:
    made = [type(f"Kind{number}", (Router,), {})() for number in range(40)]
    assert {id(one) for one in made} <= {id(one) for one in alive(Router)}


def test_a_stand_in_for_a_class_has_no_instances() -> None:
    """A framework's tests put one in the place of TopKRouter."""
    assert alive(MagicMock()) == []


def test_a_class_of_few_kinds_is_found_without_a_list_of_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have tens of millions of them."""

    def refused() -> Any:
        raise AssertionError("a list of all objects")

    router = Narrow()
    monkeypatch.setattr(gc, "get_objects", refused)
    assert any(one is router for one in alive(Narrow))
