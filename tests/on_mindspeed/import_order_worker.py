"""One order of imports and repatches: are flags kept, and the right experts recorded and replayed?

Its task holds "order", the imports in turn, and "early": does a repatch follow MindSpeed's import at once?
Then come, in one process, record and replay without a further repatch, after one, and with one in between.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from on_mindspeed.processes import triton_at_import

IMPORTS = {
    "npu_replay": ["npu_replay"],
    "mindspeed": ["mindspeed.megatron_adaptor"],
    "megatron": ["megatron.core", "megatron.core.transformer.transformer_config", "megatron.core.models.gpt"],
}
FLAGS = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LAYERS, EXPERTS, TOPK, BATCH, LENGTH = 2, 8, 2, 2, 8


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    flags: dict[str, Any] = {}
    for place, name in enumerate(task["order"]):
        with triton_at_import() if name == "mindspeed" else nullcontext():
            for module in IMPORTS[name]:
                importlib.import_module(module)
        if name == "mindspeed" and task["early"]:
            repatch({})
        if {"npu_replay", "megatron"} <= set(task["order"][: place + 1]):
            flags[f"after {name}"] = flags_kept()

    import npu_replay

    found: dict[str, Any] = {"flags": flags}
    with npu_replay.compat.cpu.lend():
        start(task["store"])
        trainer = Trainer()
        found["no repatch"] = trainer.record_and_replay()
        repatch({})
        flags["after repatch"] = flags_kept()
        found["repatch after the model was built"] = trainer.record_and_replay()
        trainer = Trainer()
        found["another model"] = trainer.record_and_replay(
            lambda: repatch({"a_name": 7, "moe_router_topk": 2})
        )
        flags["after another repatch"] = flags_kept()
        found["model of a repatched config"] = Trainer().record_and_replay()
        dist.destroy_process_group()
    npu_replay.uninstall()
    found["torch restored"] = torch.topk is TOPK_FUNCTION
    return found


TOPK_FUNCTION = torch.topk


def repatch(args: dict[str, Any]) -> None:
    from mindspeed.megatron_adaptor import repatch

    repatch(args)


def flags_kept() -> dict[str, Any]:
    """Of each flag given to each class of config: what the instance has, or the error."""
    from megatron.core.transformer import transformer_config

    def kept(name: str, flag: str) -> Any:
        try:
            return getattr(getattr(transformer_config, name)(**SMALL, **{flag: True}), flag)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    classes = ("TransformerConfig", "MLATransformerConfig")
    return {f"{name} {flag}": kept(name, flag) for name in classes for flag in FLAGS}


def start(store: str) -> None:
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class Trainer:
    """A small GPT with full recompute, two micro-batches, and a witness on every router."""

    def __init__(self) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        from npu_replay.smoke import megatron_model

        config = megatron_model.config(
            num_layers=LAYERS, num_moe_experts=EXPERTS, moe_router_topk=TOPK, **FULL
        )
        self.model = megatron_model.model(config)
        self.inputs = megatron_model.causal
        self.batches = list(torch.randint(0, 64, (2, BATCH, LENGTH)))
        self.routers = [module for module in self.model.modules() if isinstance(module, TopKRouter)]
        self.seen: list[tuple[int, int, bool, torch.Tensor]] = []
        self.batch = 0
        for router in self.routers:
            router.register_forward_hook(self._witness)

    def _witness(self, router: Any, _: Any, output: Any) -> None:
        """Which experts this call chose: micro-batch, layer, with grad, ids [rows, topk]."""
        ids = output[1].nonzero()[:, 1].view(-1, TOPK)
        self.seen.append((self.batch, router.layer_number - 1, torch.is_grad_enabled(), ids))

    def record_and_replay(self, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
        import npu_replay

        with torch.no_grad(), npu_replay.record(self.model) as recording:
            chosen = self._ids(self._forward_only())
        routes = [route.ids.sort(dim=-1).values for route in recording.routes]
        recorded = all(
            torch.equal(routes[b][:, layer], ids.to(routes[b].dtype)) for (b, layer, _), ids in chosen.items()
        )
        between()
        weights = [router.weight.detach().clone() for router in self.routers]
        with torch.no_grad():
            for router in self.routers:
                router.weight.add_(torch.randn_like(router.weight))
        alone = self._ids(self._train())
        with npu_replay.replay(self.model, recording.routes):
            replayed = self._ids(self._train())
        after = self._ids(self._train())
        with torch.no_grad():
            for router, weight in zip(self.routers, weights, strict=True):
                router.weight.copy_(weight)
        return {
            "recorded": recorded and len(routes) == len(self.batches),
            "layers": list(recording.routes[0].layers),
            "calls": [len(chosen), len(replayed)],
            "perturbed differs": any(not torch.equal(ids, _of(chosen, key)) for key, ids in alone.items()),
            "replayed": all(torch.equal(ids, _of(chosen, key)) for key, ids in replayed.items()),
            "nothing left": all(torch.equal(ids, alone[key]) for key, ids in after.items()),
        }

    def _ids(
        self, seen: list[tuple[int, int, bool, torch.Tensor]]
    ) -> dict[tuple[int, int, bool], torch.Tensor]:
        return {(batch, layer, grad): ids for batch, layer, grad, ids in seen}

    def _forward_only(self) -> list[tuple[int, int, bool, torch.Tensor]]:
        self.seen = []
        for batch, tokens in enumerate(self.batches):
            self.batch = batch
            self.model(input_ids=tokens, **self.inputs(tokens))
        return self.seen

    def _train(self) -> list[tuple[int, int, bool, torch.Tensor]]:
        """Forward, recompute and backward of each micro-batch."""
        self.seen = []
        for batch, tokens in enumerate(self.batches):
            self.batch = batch
            loss = self.model(input_ids=tokens, labels=tokens.roll(-1, 1), **self.inputs(tokens)).mean()
            loss.backward()
        return self.seen


def _of(chosen: dict[tuple[int, int, bool], torch.Tensor], key: tuple[int, int, bool]) -> torch.Tensor:
    """What the recording pass, which ran without grad, chose there."""
    batch, layer, _ = key
    return chosen[batch, layer, False]
