"""What users run into with MindSpeed is refused in words that say whose function is in the way."""

from __future__ import annotations

import re

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.first_release, pytest.mark.slow]

WORKER = "bad_input_worker:main"


def test_a_mindspeed_that_was_half_imported_is_refused(product: str) -> None:
    found = processes.run(product, WORKER, {"case": "half imported"})
    message = r"RouterError: .*half imported\. Expected all \d+ of its patches in place, got 3, without "
    assert re.match(message, found["error"]), found["error"]
    assert "python -c 'import mindspeed.megatron_adaptor'" in found["error"]
    assert found["hooks"] == 0


def test_a_repatch_in_the_middle_of_a_block_names_the_function_that_came(product: str) -> None:
    found = processes.run(product, WORKER, {"case": "repatch in a block"})
    assert re.match(
        r"RouterError: .*micro-batch 1, (topk_\w+|TopKRouter\.routing): "
        r"the code that routes was replaced inside an open block\. "
        r"Expected megatron\.core\.\S+, got another mindspeed\.\S+\. Usual cause: MindSpeed's repatch\(\)",
        found["error"],
    ), found["error"]
    assert found["hooks"] == 0
    assert found["usable"] == ""
