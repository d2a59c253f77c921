"""verl's forward step and schedule, through the functions that a job of each release calls, on a small model.

What verl's engine does around a forward is followed: set the targets, run, merge or turn to backward.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import hybrid_model
import npu_replay
from megatron_cases import RECOMPUTE, VARIANTS, perturbed, routers
from npu_replay import RoutedExperts
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import EnginePass
from npu_replay.smoke import megatron_model

PATCH = "verl.utils.megatron.router_replay_patch"
UTILS = "verl.utils.megatron.router_replay_utils"
LENGTHS = ((7, 12, 3), (5,), (9, 2))
VOCAB = 64


class Engine:
    """As much of an engine as a pass asks of it."""

    def __init__(self, model: nn.Module, config: Any, mode: str) -> None:
        self.module, self.tf_config = [model], config
        self.engine_config = SimpleNamespace(router_replay=SimpleNamespace(mode=mode))


@contextmanager
def engine_pass(model: nn.Module, config: Any, *, mode: str = "R2", trains: bool = False) -> Iterator[None]:
    """A pass of an engine with this model."""
    engine = Engine(model, config, mode)
    with EnginePass(EngineAdapter(engine), trains=trains).entered():
        yield


class Verl:
    """The functions of the verl that is on the path, called with the arguments that this release knows."""

    def __init__(self) -> None:
        self.patch: Any = importlib.import_module(PATCH)
        self.utils: Any = importlib.import_module(UTILS)
        self.replay: Any = self.patch.RouterReplay
        self.actions: Any = self.patch.RouterReplayAction
        self.jagged = any(
            hasattr(self.utils, name) for name in ("preprocess_thd_engine", "preprocess_thd_no_padding")
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.utils, name)
        known = inspect.signature(function).parameters
        return function(*args, **{key: value for key, value in kwargs.items() if key in known})

    def batch(self, sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A micro-batch as verl has it: jagged, or padded on both sides with a mask."""
        if self.jagged:
            return torch.nested.as_nested_tensor(list(sequences), layout=torch.jagged), None
        return padded(sequences)

    def record(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        forward: Callable[[Sequence[torch.Tensor]], Any],
        config: Any,
        model: nn.Module,
    ) -> torch.Tensor:
        """R2's pass over the old log-probs: the routes of all samples."""
        maps: list[torch.Tensor] = []
        with engine_pass(model, config), torch.no_grad():
            self.replay.set_global_router_replay_action(self.actions.RECORD)
            for sequences in batches:
                forward(sequences)
                assert self.utils.RouterReplayHelper.is_r2_record_action(config, 0)
                tokens, mask = self.batch(sequences)
                self.call("merge_router_topk_indices", mask, tokens, maps, config, 0, model=model)
            routes = self.call("pp_gather", self.joined(maps), config)
            self.replay.clear_global_indices()
            self.replay.clear_global_router_replay_action()
        return routes

    def joined(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """As the engine of this release joins its micro-batches, narrowing included."""
        if hasattr(self.utils, "merge_nested_router_maps"):
            return self.utils.merge_nested_router_maps(list(maps))
        if maps[0].is_nested:
            samples = [sample for one in maps for sample in one.unbind()]
            return torch.nested.as_nested_tensor(samples, layout=torch.jagged).to(torch.uint8)
        return torch.cat(list(maps), dim=0).to(torch.uint8)

    def replayed(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        routes: torch.Tensor,
        forward: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        config: Any,
        model: nn.Module,
        *,
        backward: Callable[[list[torch.Tensor]], None],
        masks: Sequence[torch.Tensor | None] | None = None,
        mode: str = "R2",
    ) -> list[torch.Tensor]:
        """The update: losses of all micro-batches, with their backward."""
        losses: list[torch.Tensor] = []
        samples = iter(list(routes.unbind()))
        with engine_pass(model, config, mode=mode, trains=True):
            self.replay.set_global_router_replay_action(self.actions.REPLAY_FORWARD)
            for number, sequences in enumerate(batches):
                mine = [next(samples) for _ in sequences]
                helper = self.utils.RouterReplayHelper
                if helper.is_replay_backward_action(config, 0):
                    self.turn(config, model, self.actions.REPLAY_FORWARD)
                assert helper.is_replay_forward_action(config, 0)
                _, attention_mask = self.batch(sequences)
                self.call(
                    "set_router_replay_data",
                    torch.nested.as_nested_tensor(mine, layout=torch.jagged)
                    if self.jagged
                    else torch.stack(mine),
                    attention_mask,
                    config,
                    0,
                    replay_mask=None if masks is None else masks[number],
                    model=model,
                )
                losses.append(forward(sequences))
                self.turn(config, model, self.actions.REPLAY_BACKWARD)
            backward(losses)
            self.replay.clear_global_router_replay_action()
            self.replay.clear_global_indices()
        return losses

    def turn(self, config: Any, model: nn.Module, action: Any) -> None:
        if hasattr(self.utils, "set_model_router_replay_action"):
            self.utils.set_model_router_replay_action(model, action)
            return
        for router in self.utils.RouterReplayHelper.get_micro_batch_router_list(config, 0):
            router.set_router_replay_action(action)


def padded(sequences: Sequence[torch.Tensor], left: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, length] with padding on both sides, as a prompt and a response leave it, and the mask."""
    width = left + 26
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, one in enumerate(sequences):
        start = left - row % 3
        tokens[row, start : start + len(one)], mask[row, start : start + len(one)] = one, 1
    return tokens, mask


def batches(seed: int = 3) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, VOCAB, (size,), generator=generator) for size in sizes] for sizes in LENGTHS]


class Job:
    """A model that asks for replay, and its forward over packed sequences."""

    def __init__(
        self, variant: str, recompute: str | None, seed: int = 7, *, pattern: str = "", **changes: Any
    ) -> None:
        """pattern: a HybridModel's, in the place of a GPTModel."""
        torch.manual_seed(seed)
        values = (
            VARIANTS[variant] | RECOMPUTE.get(recompute or "", {}) | {"enable_routing_replay": True} | changes
        )
        if pattern:
            values |= {"mtp_num_layers": 1} if "/" in pattern else {}
            self.config = hybrid_model.config(pattern, **values)
            self.model = hybrid_model.model(self.config, pattern)
        else:
            self.config = megatron_model.config(**values)
            self.model = megatron_model.model(self.config)
        for router in routers(self.model):
            if (bias := getattr(router.module, "expert_bias", None)) is not None:
                bias.copy_(torch.randn(bias.shape) * 0.1)

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        tokens = torch.cat(sequences)[None]
        inputs = megatron_model.causal(tokens)
        return self.model(input_ids=tokens, labels=tokens.roll(-1, 1), **inputs).mean()

    def grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def backward_sum(losses: list[torch.Tensor]) -> None:
    torch.stack(losses).sum().backward()


def backward_reversed(losses: list[torch.Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def core_routes(job: Job, batch: list[list[torch.Tensor]]) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(job.model) as recording:
        for sequences in batch:
            job.forward(sequences)
    return recording.routes


def core_replay(job: Job, batch: list[list[torch.Tensor]], routes: list[RoutedExperts], backward: Any) -> Any:
    job.model.zero_grad()
    with npu_replay.replay(job.model, routes):
        losses = [job.forward(sequences) for sequences in batch]
        backward(losses)
    return losses, job.grads()


def packed(routes: torch.Tensor, verl: Verl) -> torch.Tensor:
    """[all tokens, layers, topk] of what verl carries."""
    if routes.is_nested:
        return torch.cat(list(routes.unbind()))
    rows, at = [], 0
    for sequences in batches():
        _, mask = verl.batch(sequences)
        assert mask is not None
        rows += [routes[at + row][mask[row].bool()] for row in range(len(sequences))]
        at += len(sequences)
    return torch.cat(rows)


def compare_with_the_core(verl: Verl, job: Job, batch: list[list[torch.Tensor]]) -> None:
    """Record, replay and backward through verl's functions, against npu_replay's own blocks, bit for bit."""
    own = core_routes(job, batch)
    routes = verl.record(batch, job.forward, job.config, job.model)
    assert torch.equal(packed(routes, verl).long(), torch.cat([one.ids for one in own]).long())
    with perturbed(job.model):
        for backward in (backward_sum, backward_reversed):
            wanted, grads = core_replay(job, batch, own, backward)
            job.model.zero_grad()
            losses = verl.replayed(batch, routes, job.forward, job.config, job.model, backward=backward)
            assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
            assert all(
                a is b or (a is not None and b is not None and torch.equal(a, b))
                for a, b in zip(job.grads(), grads, strict=True)
            )
        live = core_routes(job, batch)
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(live, own, strict=True)), "nothing to replay"
    assert not npu_replay.report().open_sessions
