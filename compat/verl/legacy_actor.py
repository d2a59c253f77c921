"""Adapts verl 0.7's own Megatron actor, whose action comes before its pass.

Its workers set the action and then run the actor's schedule, so an action waits for the pass that says whose
chunks it means. `install` wraps its methods by the functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import Actions
from npu_replay.compat.verl.files import ROUTES

ACTOR = "verl.workers.actor.megatron_actor"
WORKERS = "verl.workers.megatron_workers"


class LegacyActorAdapter(EngineAdapter):
    """Adapts a MegatronPPOActor."""

    @property
    def settings(self) -> Any:
        return self.engine.config.router_replay

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self.engine.actor_module  # type: ignore[no-any-return]


def waiting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep an action for the pass that runs inside."""
    with Actions().entered():
        return original(*args, **kwargs)


def reference(original: Any, self: Any, data: Any) -> Any:
    """Set no action in a LoRA actor's reference pass, which goes through compute_log_prob."""
    with Actions(is_off=True).entered():
        output = original(self, data)
    batch = getattr(output, "batch", None)
    if batch is not None and ROUTES in batch.keys():  # noqa: SIM118  a TensorDict iterates over rows
        del batch[ROUTES]
    return output
