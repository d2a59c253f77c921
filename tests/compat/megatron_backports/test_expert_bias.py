"""compat.router_init: padding stays out of the counts for the expert bias; else the mask is as it was.

Megatron-core 0.16 to 0.19 lay the mask over the experts; 0.12 to 0.15 know no mask. Through whole models:
tests/matrix/test_padding_mask.py.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import megatron_cases as cases
import npu_replay
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching.patches import Patches
from npu_replay.smoke import megatron_model

MASKS = {
    # rows: as many as experts (there the wrong counts come without an error), and others
    "as many rows as experts": (4, 2),
    "more rows": (12, 2),
}


@pytest.fixture(autouse=True)
def own_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of this test's own, and what is to be undone."""
    monkeypatch.setattr(router_init, "_methods", Patches("methods of TopKRouter"))


# Functions that could be there


def over_experts(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """As Megatron-core 0.16 to 0.19."""
    if padding_mask is not None:
        routing_map = routing_map & (~padding_mask)
    self.local_tokens_per_expert += routing_map.sum(dim=0)


def over_rows(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """As later releases."""
    if padding_mask is not None:
        routing_map = routing_map & (~padding_mask).unsqueeze(-1)
    self.local_tokens_per_expert += routing_map.sum(dim=0)


def mended(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """As a framework mends it, on the class."""
    if padding_mask is not None and padding_mask.dim() == 1:
        padding_mask = padding_mask.unsqueeze(-1)
    over_experts(self, routing_map, padding_mask)


def router_of(method: Any) -> Any:
    cls = type("TopKRouter", (torch.nn.Module,), {"_apply_expert_bias": method})
    router = cls()
    router.enable_expert_bias = True
    router.local_tokens_per_expert = torch.zeros(3)
    return router


MAP = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
PADDING = torch.tensor([False, True, False])


@pytest.mark.parametrize("method", [over_experts, over_rows, mended])
def test_padding_is_left_out_whoever_is_right(method: Any) -> None:
    router = router_of(method)
    router_init.lend(router, router_init.missing(router))
    router._apply_expert_bias(MAP, padding_mask=PADDING)
    assert router.local_tokens_per_expert.tolist() == [2, 1, 1]
    router._apply_expert_bias(MAP)
    assert router.local_tokens_per_expert.tolist() == [4, 3, 3]


@pytest.mark.parametrize("method", [over_rows, mended])
def test_a_class_that_somebody_mends_later_is_still_right(method: Any) -> None:
    router = router_of(over_experts)
    router_init.lend(router, router_init.missing(router))
    type(router)._apply_expert_bias = method
    router._apply_expert_bias(MAP, PADDING)
    assert router.local_tokens_per_expert.tolist() == [2, 1, 1]


def test_a_router_without_a_bias_or_without_the_method_is_left_as_it_is() -> None:
    router = router_of(over_experts)
    router.enable_expert_bias = False
    other = torch.nn.Module()
    other.enable_expert_bias = True  # type: ignore[assignment]
    for one in (router, other):
        router_init.lend(one, router_init.missing(one))
        assert "_apply_expert_bias" not in vars(one)


# Real routers


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Any:
    """A real TopKRouter with an expert bias, as its class has it, before anybody equips it."""
    request.getfixturevalue("megatron")
    torch.manual_seed(3)
    from megatron.core.transformer.moe.router import TopKRouter

    model = megatron_model.model(megatron_model.config(num_layers=1, **cases.SIGMOID_BIAS)).to(cases.DEVICE)
    (found,) = (one for one in model.modules() if isinstance(one, TopKRouter))
    router_init._methods.undo()
    return found


def takes_mask(router: Any) -> bool:
    return "padding_mask" in inspect.signature(type(router).routing).parameters


def hidden(length: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, batch, 32, generator=generator).to(cases.DEVICE)


def padding(length: int, batch: int) -> torch.Tensor:
    """bool [length, batch]: the second half of each sequence but the first."""
    mask = torch.zeros(length, batch, dtype=torch.bool)
    mask[length // 2 :, 1:] = True
    return mask.to(cases.DEVICE)


def counts(router: Any, length: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's own counts, and those of its map's unpadded rows."""
    mask = padding(length, batch)
    router.local_tokens_per_expert.zero_()
    _, routing_map = router(hidden(length, batch), padding_mask=mask)
    return router.local_tokens_per_expert, routing_map[~mask.reshape(-1)].sum(dim=0).to(torch.float32)


@pytest.mark.megatron
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_only_unpadded_rows_are_counted(router: Any, shape: tuple[int, int]) -> None:
    if not takes_mask(router):
        with pytest.raises(TypeError, match="padding_mask"):
            router(hidden(*shape), padding_mask=padding(*shape))
        with pytest.raises(TypeError, match="padding_mask"), npu_replay.record(router):
            router(hidden(*shape), padding_mask=padding(*shape))
        return
    assert not counts_right(router, shape), "the fault that this is for"
    router_init.lend(router, router_init.missing(router))
    assert counts_right(router, shape)
    groups = {id(one): one for one in vars(router).values() if isinstance(one, ProcessGroup)}
    assert counts_right(copy.deepcopy(router, groups), shape)


def counts_right(router: Any, shape: tuple[int, int]) -> bool:
    try:
        got, wanted = counts(router, *shape)
    except RuntimeError:  # torch's or dynamo's: the mask can't be broadcast
        return False
    return torch.equal(got, wanted)


@pytest.mark.megatron
def test_each_router_gets_it_as_it_is_built_and_gives_it_back(router: Any) -> None:
    npu_replay.install()
    built = type(router)(**arguments(router))
    assert ("_apply_expert_bias" in vars(built)) == takes_mask(built)
    router_init._methods.undo()  # as uninstall() does
    assert "_apply_expert_bias" not in vars(built)
    assert list(router_init._methods) == []


def arguments(router: Any) -> dict[str, Any]:
    """What its constructor wants besides the config: process groups, if it can't do without."""
    named = inspect.signature(type(router).__init__).parameters
    from megatron.core.transformer.moe import moe_utils

    for name, default in (
        ("model_comm_pgs", "get_default_model_comm_pgs"),
        ("pg_collection", "get_default_pg_collection"),
    ):
        if name in named:
            return {"config": router.config, name: getattr(moe_utils, default)()}
    return {"config": router.config}
