"""Which modules are a model's chunks, where nobody says so: on modules that stand for Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from npu_replay.compat.verl import live_models


class Router(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer


def chunk(config: Any, *layers: int, mtp: bool = False) -> nn.Module:
    model = nn.Module()
    model.decoder = nn.ModuleList([Router(config, layer) for layer in layers])
    if mtp:
        model.mtp = nn.ModuleList([Router(config, 1)])
    return model


def models_of(monkeypatch: pytest.MonkeyPatch, *roots: nn.Module) -> list[list[nn.Module]]:
    routers = [one for root in roots for one in root.modules() if isinstance(one, Router)]
    monkeypatch.setattr(live_models, "routers", lambda: routers)
    return live_models.models()


def test_chunks_of_one_config_are_one_model_in_the_order_of_their_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace()
    first, second = chunk(config, 1, 2), chunk(config, 3, 4)
    assert models_of(monkeypatch, first, second) == [[first, second]]
    assert models_of(monkeypatch, nn.ModuleList([second, first])) == [[second, first]], "a list isn't called"


def test_a_model_that_was_built_twice_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace()
    first, again, other = chunk(config, 1, 2), chunk(config, 1, 2), chunk(SimpleNamespace(), 1)
    assert models_of(monkeypatch, first, again, other) == [[first], [again], [other]]


def test_the_outermost_wrapper_is_meant_and_mtp_is_no_layer_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace()
    wrapper = nn.Sequential(chunk(config, 1, mtp=True))
    second = chunk(config, 2)
    assert models_of(monkeypatch, wrapper, second) == [[wrapper, second]]
