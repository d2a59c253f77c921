"""Completes verl's RouterReplay, of which each replayed router has one, as after verl's own patch.

Outside an engine's pass each router records or replays by its own action. Megatron's router asks it from 0.16
on, and the seam before (`megatron_backports.router_init`), so no routing is patched.

Asks:     whether the class has `get_replay_topk`, as from 0.9 on.
Changes:  that method where it lacks; `set_router_replay_action`, which takes Megatron's actions too.
Undone:   with `install`, whose patches they are; each instance leaves verl's list with its router.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from npu_replay.compat.megatron.routers import IDLE_WITHOUT_ACTION
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl.engine_pass import BACKWARD, RECORD, REPLAY


def complete(kind: Any, actions: Any, patches: Patches) -> None:
    """Let Megatron's routers ask verl's RouterReplay (`kind`), and let it take Megatron's actions too."""

    def set_router_replay_action(original: Any, self: Any, action: Any) -> None:
        original(self, None if action is None else actions(getattr(action, "value", action)))

    patches.set(kind, IDLE_WITHOUT_ACTION, True, "without an action a router need not ask it")
    patches.wrap(kind, "set_router_replay_action", set_router_replay_action, "takes Megatron's actions too")
    if not hasattr(kind, "get_replay_topk"):  # below 0.9
        patches.set(kind, "get_replay_topk", get_replay_topk, "Megatron's routers ask it, unpatched")


def get_replay_topk(
    self: Any,
    scores: torch.Tensor,
    topk: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
    default_compute_topk: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a router's top-k under its action, as verl's own patch of the routing does."""
    action, ids = getattr(self.router_replay_action, "value", None), None
    if action == REPLAY:
        ids = self.target_topk_idx
    elif action == BACKWARD and self.replay_backward_list:
        ids = self.replay_backward_list.pop(0)
    if ids is not None:
        ids = ids.to(scores.device, torch.int64)
        return scores.gather(1, ids), ids
    values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
    if action == RECORD:
        self.record_indices(ids)
    return values, ids


def made_for(kind: Any, router: Any) -> Any:
    """Make a router's RouterReplay, which leaves verl's list when the router is garbage."""
    made = kind()
    # A weak reference, so that the finalizer doesn't keep the instance alive.
    everyone, mine = kind.router_instances, weakref.ref(made)

    def leave() -> None:
        everyone[:] = [one for one in everyone if one is not mine()]

    weakref.finalize(router, leave).atexit = False
    return made
