"""Training with Megatron-core alone, to the last bit, in each state of npu_replay in a process: a job that
asks for no replay is untouched.

The job is `run` (tests/untouched.py). tests/on_verl has the same of verl's engines.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from untouched import ABSENT, STATES, digest, outcomes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

COUNTED = "an expert bias that counts rows"


def test_megatron_trains_as_without_the_package(tmp_path: Path) -> None:
    """Losses, gradients, expert biases and weights; and these would show what a wrapper changes."""
    states = {**STATES, "imported": {}, COUNTED: {"NPU_REPLAY_EXPERT_BIAS": "1"}}
    by_state = outcomes("test_untouched", tmp_path, states=states)
    counted = by_state.pop(COUNTED)
    for state, outcome in by_state.items():
        assert outcome == by_state[ABSENT], state
    if by_state[ABSENT]["masked"]:
        assert counted != by_state[ABSENT]


# The job

STEPS = 3
MODEL: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def run(task: dict[str, Any], *, ask: bool) -> dict[str, Any]:
    """Digests of some steps; with `ask` after steps inside blocks, on the same model, and an uninstall()."""
    from lent.compat import cpu
    from lent.smoke import megatron_model

    with cpu.lend():
        megatron_model.start(torch.device("cpu"))
        torch.manual_seed(7)
        if ask:
            npu_replay = importlib.import_module("npu_replay")
            npu_replay.install()
        model = megatron_model.model(megatron_model.config(**MODEL))
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
        if ask:
            with npu_replay.record(model) as recording:
                _trained(model, steps=1)
            with npu_replay.replay(model, recording.routes):
                _trained(model, steps=1)
            npu_replay.uninstall()
            model.load_state_dict(kept)
            for router in (part for part in model.modules() if hasattr(part, "local_tokens_per_expert")):
                router.local_tokens_per_expert.zero_()
        return _trained(model)


def _trained(model: Any, steps: int = STEPS) -> dict[str, Any]:
    from lent.smoke import megatron_model

    finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    figures: dict[str, Any] = {"losses": [], "gradients": [], "bias": []}
    masked = "padding_mask" in inspect.signature(type(model).forward).parameters
    for _ in range(steps):
        tokens = torch.randint(0, 64, (2, 4), generator=generator)  # 8 rows, since 0.16 masks the 8 experts
        padding = {"padding_mask": torch.arange(4) >= torch.tensor([[3], [2]])} if masked else {}
        optimizer.zero_grad()
        losses = model(
            input_ids=tokens, labels=tokens.roll(-1, 1), **megatron_model.causal(tokens), **padding
        )
        losses.mean().backward()
        finalize._update_router_expert_bias([model], model.config)
        optimizer.step()
        figures["losses"].append(losses.mean().item())
        figures["gradients"].append(digest(parameter.grad for parameter in model.parameters()))
        figures["bias"].append(
            digest(buffer for name, buffer in model.named_buffers() if "expert_bias" in name)
        )
    return figures | {"weights": digest(model.parameters()), "masked": masked}
