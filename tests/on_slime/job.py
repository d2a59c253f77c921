"""slime's own queues, stages, batches and `fill_routing_replay`, on a small model of Megatron-core.

slime's actor can't be imported here (its line 13 imports ray, 17 on torch_memory_saver, which takes CUDA), so
its method and the batches it walks over are taken from the files as they are, by their names. The steps
between are those of its `train_actor` and of its forward step, which set the stages.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import npu_replay
from npu_replay.smoke import megatron_model
from zoo.gpt_split import witnessed
from zoo.outcome import as_map, changed

EXPERTS = 8
TOPK = 2
MOE = [0, 1, 1, 1]
LENGTHS = (7, 12, 9)
STAGE = "ROUTING_REPLAY_STAGE"
Maps = dict[int, list[torch.Tensor]]
"""By layer, the map, bool [rows, experts], of each call of its router."""


def taken(module: str, *names: str, **known: Any) -> dict[str, Any]:
    """Classes and functions of a file of slime's, as they are there; a method too, without its class."""
    root = find_spec("slime")
    assert root is not None
    file = Path(str(root.origin)).parent / f"{module.replace('.', '/')}.py"
    tree = ast.parse(file.read_text())
    definitions = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
    assert {node.name for node in definitions} == {*names}, names  # type: ignore[attr-defined]
    future = ast.parse("from __future__ import annotations").body
    code = compile(ast.Module([*future, *definitions], []), str(file), "exec")  # type: ignore[list-item]
    space = dict(known)
    exec(code, space)
    return {name: space[name] for name in names}


def routes() -> list[torch.Tensor]:
    """What a rollout hands out of each sample: int32 [tokens - 1, all layers, topk]."""
    drawn = torch.Generator().manual_seed(5)
    return [
        torch.rand(length - 1, len(MOE), EXPERTS, generator=drawn).argsort(dim=-1)[..., :TOPK].int()
        for length in LENGTHS
    ]


class Actor:
    """A model, its batches, and slime's way of filling the queues."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        recompute = megatron_model.FULL_RECOMPUTE
        config = megatron_model.config(moe_layer_freq=MOE, num_moe_experts=EXPERTS, **recompute)
        self.model = megatron_model.model(config).train()
        for name, weight in self.model.named_parameters():
            if "router" in name:
                torch.nn.init.normal_(weight, std=1.0)
        self.routers = [module for module in self.model.modules() if type(module).__name__ == "TopKRouter"]
        self.batches = [torch.randint(0, 64, (1, length)) for length in LENGTHS]

    def fill(self, rollout: Sequence[torch.Tensor]) -> None:
        from megatron.core import mpu
        from slime.backends.megatron_utils import cp_utils

        each = [[number] for number in range(len(self.batches))]
        data = {"tokens": [batch[0] for batch in self.batches], "rollout_routed_experts": list(rollout)}
        iterator = taken("backends.megatron_utils.data", "DataIterator")["DataIterator"](
            data, micro_batch_indices=each
        )
        known = {name: function for name, function in vars(cp_utils).items() if callable(function)}
        method = taken("backends.megatron_utils.actor", "fill_routing_replay", torch=torch, mpu=mpu, **known)
        args = SimpleNamespace(
            num_experts=EXPERTS, data_pad_size_multiplier=1, sequence_parallel=False, allgather_cp=False
        )
        actor = SimpleNamespace(args=args, model=[SimpleNamespace(module=self.model)])
        method["fill_routing_replay"](actor, [iterator], [len(self.batches)], data)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, **megatron_model.causal(tokens)).mean()

    def log_probs(self, stage: str) -> None:
        """slime's compute_log_prob, in the stage that train_actor sets for it."""
        os.environ[STAGE] = stage
        with torch.no_grad():
            for tokens in self.batches:
                self.loss(tokens)

    def update(self) -> None:
        """slime's train: its forward step goes to replay_forward and back; backward follows each forward."""
        for tokens in self.batches:
            os.environ[STAGE] = "replay_forward"
            loss = self.loss(tokens)
            os.environ[STAGE] = "replay_backward"
            loss.backward()

    def witnessed(self) -> AbstractContextManager[Maps]:
        return witnessed([self.model], recomputes=True)

    def other_routers(self) -> AbstractContextManager[None]:
        return changed((number, router.weight) for number, router in enumerate(self.routers))


def same(calls: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Row by row; a wanted map may be shorter by the last token, which has no route."""
    pairs = list(zip(calls, wanted, strict=True))
    return all(torch.equal(call[: len(other)], other) for call, other in pairs)


@contextmanager
def begun() -> Iterator[tuple[Actor, Any, dict[str, Any]]]:
    """An actor, slime's class of queues, and what was found so far."""
    os.environ |= {"ENABLE_ROUTING_REPLAY": "1", STAGE: "fallthrough"}
    with npu_replay.compat.cpu.lend():
        megatron_model.start(torch.device("cpu"))
        from slime.utils.routing_replay import RoutingReplay

        actor = Actor()
        _lend_queues(RoutingReplay)
        yield actor, RoutingReplay, {"replays": len(RoutingReplay.all_routing_replays)}


def main(task: dict[str, Any]) -> dict[str, Any]:
    """R3 and R2 with recompute; what shows without replay, and how often each queue was asked."""
    with begun() as (actor, kind, results):
        results["hooks"] = [len(router._forward_pre_hooks) for router in actor.routers]
        results |= {"r3": _r3(actor, kind), "r2": _r2(actor, kind)}
        return results | {stage: _refused(actor, stage) for stage in ("replay_forward", "replay")}


def stand_in(task: dict[str, Any]) -> dict[str, Any]:
    """R2 alone, on a module that has slime's names; what of it was changed."""
    with begun() as (actor, kind, results):
        changed = [patch.where for patch in npu_replay.report().patches if patch.where.startswith("slime.")]
        results["patches"] = sorted(path.rpartition(".")[2] for path in changed)
        return results | ({"r2": _r2(actor, kind)} if results["replays"] else {})


def _lend_queues(kind: Any) -> None:
    """slime pins ids for a device, which is not here."""
    kind.record = lambda self, ids: self.top_indices_list.append(ids.clone())
    kind.pop_forward = _next("forward_index")
    kind.pop_backward = _next("backward_index")


def _next(index: str) -> Any:
    def pop(self: Any) -> torch.Tensor:
        assert (index == "backward_index") == (torch._C._current_graph_task_id() != -1), "the other queue's"
        ids: torch.Tensor = self.top_indices_list[getattr(self, index)]
        setattr(self, index, getattr(self, index) + 1)
        return ids

    return pop


def _r3(actor: Actor, kind: Any) -> dict[str, Any]:
    rollout = routes()
    actor.fill(rollout)
    with actor.witnessed() as first:
        actor.log_probs("replay_forward")
    kind.clear_all_forward()
    with actor.witnessed() as second:
        actor.update()
    asked = [(queue.forward_index, queue.backward_index) for queue in kind.all_routing_replays]
    kind.clear_all()
    layers = [layer for layer, sparse in enumerate(MOE) if sparse]
    maps = {layer: [as_map(ids[:, layer], EXPERTS) for ids in rollout] for layer in layers}
    with actor.witnessed() as own:
        actor.log_probs("fallthrough")
    return {
        "log_probs": all(same(first[layer], maps[layer]) for layer in layers),
        "update": _twice(second, maps),
        "calls": [len(calls) for calls in second.values()],
        "asked": asked,
        "own": all(same(own[layer], maps[layer]) for layer in layers),
    }


def _r2(actor: Actor, kind: Any) -> dict[str, Any]:
    with actor.witnessed() as first:
        actor.log_probs("record")
    with actor.other_routers():
        with actor.witnessed() as second:
            actor.update()
        kind.clear_all()
        with actor.witnessed() as own:
            actor.log_probs("fallthrough")
    return {"update": _twice(second, first), "own": all(same(own[layer], first[layer]) for layer in first)}


def _twice(calls: Maps, wanted: Maps) -> bool:
    """Does each router put out what is wanted, in forwards and in the recompute that follows each?"""
    return all(
        same(calls[layer][::2], wanted[layer]) and same(calls[layer][1::2], wanted[layer]) for layer in wanted
    )


def _refused(actor: Actor, stage: str) -> str:
    """Where more forwards run than were filled, or the stage is none."""
    try:
        actor.log_probs(stage)
    except (npu_replay.ReplayError, ValueError) as error:
        return str(error)
    return "it went on"
