"""The reference model's log-probs need no routes: verl's trainer sends it a batch without them.

A dispatch carries all that a batch has to every rank, and routes are most of it. Where the reference is the
actor without its adapter (LoRA), the actor is asked for its log-probs, and 0.7's wants routes with that. The
trainers over TransferQueue (0.9's `trainer.ppo.v1`) send keys alone, and their workers fetch every field.

Waits for verl's trainer. Probes: the method that it wraps. Offers: `install`. Undone by
`npu_replay.uninstall()`.
"""

from __future__ import annotations

from typing import Any

from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl.delivery import COLUMN
from npu_replay.compat.verl.files import ROUTES

TRAINER = "verl.trainer.ppo.ray_trainer"
_METHOD = "_compute_ref_log_prob"
_WHAT = "routes that verl's reference is sent for nothing"
_patches = Patches(_WHAT)


def install() -> None:
    """Wrap verl's trainer, now or when it is imported."""
    import_hook.when_imported(TRAINER, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    if hasattr(module.RayPPOTrainer, _METHOD):  # 0.7.1 on
        _patches.wrap(module.RayPPOTrainer, _METHOD, _without_routes, "a reference is never replayed")


def _without_routes(original: Any, self: Any, batch: Any) -> Any:
    names, columns = (set(part.keys()) for part in (batch.batch, batch.non_tensor_batch))
    if ROUTES not in names or getattr(self, "ref_in_actor", False):
        return original(self, batch)
    return original(self, batch.select(names - {ROUTES}, columns - {COLUMN}))
