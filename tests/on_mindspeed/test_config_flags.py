"""The flags of routing replay survive what MindSpeed does to configs; tests/compat has them without it."""

from __future__ import annotations

from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

WORKER = "flags_worker:main"
ORDERS = {
    "npu_replay first": ["npu_replay", "mindspeed.megatron_adaptor"],
    "MindSpeed first": ["mindspeed.megatron_adaptor", "npu_replay"],
}
KEPT: dict[str, Any] = {
    "not given": False,
    "given": True,
    "the other name": True,
    "copy": True,
    "deepcopy": True,
    "asdict": True,
    "replace": True,
    "replace did": 3,
    "its own class": True,
    "its fields": True,
    "signature": True,
    "on the class": False,
    "repatch": True,
    "repatch with arguments": True,
    "the arguments too": 4,
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_flag_that_was_given_is_there_whatever_was_done_to_the_config(product: str, order: str) -> None:
    """T5; and a wrap that a repatch throws away, a class attribute or signature that MindSpeed trips on."""
    found = processes.run(product, WORKER, {"order": ORDERS[order]})
    for name in ("TransformerConfig", "MLATransformerConfig"):
        ways = dict(found[name])
        own, bare = ways.pop("subclass"), ways.pop("subclass, nothing given")
        assert ways == KEPT, name
        # MindSpeed up to 2.3.0 lets nobody build a subclass of his own, with a flag or without.
        assert own is True or ("AttributeError" in own and own == bare), name
    assert found["undone"] == {"uninstalled": False, "and repatched": False}
