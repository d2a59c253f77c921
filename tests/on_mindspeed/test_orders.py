"""npu_replay, MindSpeed and Megatron may be imported in any order, and repatch() called at any time.

Covered: npu_replay before, between and after the other two, with and without a repatch right after the import
of MindSpeed; and in each process, one after the other: no repatch after the model was built, one, one between
record and replay, a model that was built after them. Recompute is full throughout. Then what
becomes of a config's flags in the hands of MindSpeed and of people, and what is left after uninstall().
"""

from __future__ import annotations

from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

NPU = "npu_replay"
MIND = "mindspeed"
MEGATRON = "megatron"
ORDERS = [  # MindSpeed's import imports Megatron, so only npu_replay may still come after an early repatch
    ((NPU, MIND, MEGATRON), ""),
    pytest.param((MIND, NPU, MEGATRON), "early", marks=pytest.mark.first_release),
    pytest.param((MEGATRON, NPU, MIND), "", marks=pytest.mark.first_release),
    pytest.param((NPU, MEGATRON, MIND), "", marks=pytest.mark.first_release),
    pytest.param((MEGATRON, MIND, NPU), "early", marks=pytest.mark.first_release),
]
KEPT: dict[str, Any] = {
    "not given": False,
    "given": True,
    "the other name": True,
    "copy": True,
    "deepcopy": True,
    "asdict": True,
    "its fields": True,
    "signature": True,
    "on the class": False,
    "repatch": True,
    "repatch with arguments": True,
    "the arguments too": 4,
}


@pytest.mark.parametrize(
    ("order", "early"), ORDERS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_any_order_of_imports_keeps_flags_and_replays(
    product: str, order: tuple[str, ...], early: str
) -> None:
    """T5; and a wrap that a repatch throws away, a class attribute or signature that MindSpeed trips on."""
    found = processes.run(product, "worker:orders", {"order": order, "early": early}, timeout=280)
    assert found["torch restored"]
    lost = {when: [flag for flag in kept if kept[flag] is not True] for when, kept in found["flags"].items()}
    assert not any(lost.values()), lost
    for name in ("TransformerConfig", "MLATransformerConfig"):
        ways = dict(found[name])
        own = ways.pop("subclass")
        bare = ways.pop("subclass, nothing given")
        assert ways == KEPT, name
        # MindSpeed up to 2.3.0 lets nobody build a subclass of his own, with a flag or without.
        assert own is True or ("AttributeError" in own and own == bare), name
    assert found["undone"] == [False, False]
