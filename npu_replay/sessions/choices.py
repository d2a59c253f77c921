"""Choose the ids of a router's call: given ids, or those of the forward that it repeats; else `Call.own`.

Each function takes a call and returns int64 [rows, topk].
"""

from __future__ import annotations

import torch

from npu_replay.seam.call import Call
from npu_replay.sessions.route_source import Given


def given_ids(call: Call) -> torch.Tensor:
    """Return the given ids; rows without a route take the router's own choice."""
    calls = call.owner  # RouterCalls
    shared = calls.shared
    on_device: Given = call.routes
    missing = on_device.missing
    ids = on_device.by_layer[calls.label].long()
    if call.micro_batch.compares and shared.own is not None:
        shared.own.compare(call, ids, on_device)
    if missing is not None:  # never in place: layers may share their storage
        ids = ids.index_copy(0, missing, call.own(missing))
    return ids


def ids_of_forward(call: Call) -> torch.Tensor:
    """Return the ids of the forward's call, for its recompute."""
    own = call.owner.shared.own
    if own is not None:
        own.count_in(call)
    ids: torch.Tensor = call.routes.long()
    if not call.plan.is_given and call.taken_by is not None and call.taken_by[2].get("sorted"):
        # Megatron-core from 0.18 on requests sorted ids only with grad, which is off in a checkpoint's
        # forward. In another order of experts their outputs would be summed with other rounding.
        order = call.scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return ids
