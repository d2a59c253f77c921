"""npu_replay, MegatronAdaptor and MindSpeed in any order; each of the two patches anew at any time.

Each keeps a registry of its own, and its repatch() drops what lies over its wrapper of a constructor.
A MindSpeed that goes with MegatronAdaptor imports it first, so it never lies beneath MindSpeed's wrapper.
"""

from __future__ import annotations

import pytest

from on_mindspeed import processes
from on_mindspeed.adaptor_worker import BY_ITSELF

NPU = "npu_replay"
MIND = "mindspeed"
ADAPTOR = "adaptor"
ORDERS = [
    (NPU, ADAPTOR),
    (ADAPTOR, NPU),
    (NPU, ADAPTOR, MIND),
    (ADAPTOR, NPU, MIND),
    (ADAPTOR, MIND, NPU),
]


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_flags_are_kept_in_any_order_and_through_any_repatch(product: str, order: tuple[str, ...]) -> None:
    wrong = processes.run(product, "adaptor_worker:orders", {"order": order}, timeout=280)
    if "unsupported" in wrong:
        pytest.skip(*wrong["unsupported"])
    by_itself = {step for step, faults in wrong.items() if faults and faults[0].startswith(BY_ITSELF)}
    assert not by_itself or MIND in order, wrong
    assert not any(step == "import" or MIND in step for step in by_itself), wrong
    products = set(order) - {NPU}
    assert {f"{name}, {turn} repatch" for name in products for turn in ("first", "second")} < set(wrong)
    assert not {step: faults for step, faults in wrong.items() if faults and step not in by_itself}
