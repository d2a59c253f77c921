"""A vision-language model, whose decoder is not at its top: the decoder's routers are the ones that count.

T47: who takes `getattr(chunk, "decoder", chunk)` takes the whole of such a model, with the layers of
multi-token prediction inside its language model and of the vision tower beside it. All are numbered from 1.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from npu_replay.compat.megatron import parallel_state as megatron_layout
from npu_replay.errors import RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import find
from npu_replay.smoke import megatron_model

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


class VisionLanguage(nn.Module):
    """Megatron's own parts, put together as LLaVA's are; no `decoder`, and no `mtp`, at the top."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = megatron_model.config(**changes)
        self.vision_model = Tower()
        self.language_model = megatron_model.model(self.config)
        self.language_model.mtp = nn.ModuleList([megatron_model.model(self.config).decoder.layers[-1]])
        for layer in self.language_model.mtp:
            layer.layer_number = 1
            layer.mlp.set_layer_number(1)


class Tower(nn.Module):
    """A dense transformer of more layers than the decoder, which vision models call their decoder, too."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        dense: dict[str, Any] = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "num_layers": 6}
        self.config = megatron_model.config(**(dense | changes))
        self.decoder = megatron_model.model(self.config).decoder


@pytest.mark.parametrize("freq", [1, [0, 1, 1, 1]])
def test_the_decoders_routers_are_found_with_their_own_numbers(freq: int | list[int]) -> None:
    labels = range(4) if freq == 1 else range(1, 4)
    assert [(router.path, router.label) for router in find([VisionLanguage(moe_layer_freq=freq)])[0]] == [
        (f"language_model.decoder.layers.{label}.mlp.router", label) for label in labels
    ]


def test_a_tower_that_routes_too_is_refused_by_its_number() -> None:
    model = VisionLanguage()
    model.vision_model = Tower(num_moe_experts=4, moe_ffn_hidden_size=32)
    with pytest.raises(RouterError, match=r"same decoder layer.*a second tower") as error:
        find([model])
    assert "vision_model.decoder.layers.0.mlp.router" in str(error.value)
    assert "language_model.decoder.layers.0.mlp.router" in str(error.value)


def test_the_towers_layers_are_not_taken_for_those_of_a_missing_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both chunks of a rank with two virtual stages: four decoder layers in all, the tower in the first."""
    from megatron.core import parallel_state

    chunks = [VisionLanguage(num_layers=2), VisionLanguage(num_layers=2)]
    for number, layer in enumerate(layer for one in chunks for layer in one.language_model.decoder.layers):
        layer.layer_number = number + 1
        layer.mlp.set_layer_number(number + 1)
    del chunks[1].vision_model
    for one in chunks:
        one.config.num_layers = 4
        one.config.virtual_pipeline_model_parallel_size = 2
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 2)
    megatron_layout.check_chunks([*map(ModuleTree.of, chunks)])
    with pytest.raises(
        RouterError, match=r"isn't all that this rank has.*got 1 with decoder layers \[0, 1\]"
    ):
        megatron_layout.check_chunks([ModuleTree.of(chunks[0])])
