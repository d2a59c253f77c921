"""How a step's rows leave a worker: the calls of a release's runner in their order, and vLLM's store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe import routed_experts_capturer

from on_vllm_ascend.cases import BLOCK

BLOCK_TABLE = [6, 2, 5, 1, 3]
"""The blocks of the one request, whose tokens all steps are."""


def road(runner: Any) -> Any:
    if hasattr(routed_experts_capturer.RoutedExpertsCapturer, "save_captured_experts"):
        return SharedMemory(runner)
    if hasattr(routed_experts_capturer.RoutedExpertsCapturer, "get_routed_experts"):
        return Snapshot(runner)
    return Buffer(runner)


class Road:
    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.done = 0

    def slots(self, tokens: int) -> Any:
        """Where the step's tokens lie in the KV cache."""
        positions = np.arange(self.done, self.done + tokens)
        self.done += tokens
        return np.array(BLOCK_TABLE)[positions // BLOCK] * BLOCK + positions % BLOCK

    def before(self) -> None: ...

    def close(self) -> None: ...


class SharedMemory(Road):
    """vLLM 0.18 to 0.20."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.capturer = routed_experts_capturer.RoutedExpertsCapturer.get_instance()
        self.is_writer = self.capturer._shm is not None
        if self.is_writer:
            self.reader = routed_experts_capturer.RoutedExpertsReader.create()
            self.reader.attach_buffer(runner.max_num_kv_tokens, runner.vllm_config)

    def before(self) -> None:
        self.capturer.clear_buffer()

    def after(self, tokens: int, padding: int) -> Any:
        slots = self.slots(tokens)
        self.runner.cpu_slot_mapping = np.concatenate([slots, np.full(padding, -1)])
        self.capturer.save_captured_experts(indices=self.runner.cpu_slot_mapping)
        return self.reader.get_routed_experts(slots) if self.is_writer else None

    def close(self) -> None:
        if self.is_writer:
            self.reader.cleanup()
        self.capturer.cleanup()


class Managed(Road):
    """With vLLM's manager in the scheduler, by the request's blocks."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.manager = routed_experts_capturer.RoutedExpertsManager(
            runner.vllm_config, runner.kv_cache_config
        )

    def stored(self, rows: Any, slots: Any, tokens: int) -> Any:
        self.manager.store_batch(rows, slots)
        return self.manager.get(BLOCK_TABLE, self.done)[-tokens:]


class Buffer(Managed):
    """vLLM 0.22 to 0.29 on the V1 runner, without asynchronous scheduling."""

    def before(self) -> None:
        self.runner.routed_experts_capturer.clear_buffer()

    def after(self, tokens: int, padding: int) -> Any:
        runner = self.runner
        runner.routed_experts_slot_mapping_device[:tokens].copy_(torch.from_numpy(self.slots(tokens)))
        buffer = runner.routed_experts_capturer.get_device_buffer()
        runner.routed_experts_cpu[:tokens].copy_(buffer[:tokens], non_blocking=True)
        runner.routed_experts_slot_mapping_cpu[:tokens].copy_(
            runner.routed_experts_slot_mapping_device[:tokens], non_blocking=True
        )
        rows = runner.routed_experts_cpu[:tokens].numpy()
        return self.stored(rows, runner.routed_experts_slot_mapping_cpu[:tokens].numpy(), tokens)


class Snapshot(Managed):
    """vLLM 0.30's V2 runner."""

    def after(self, tokens: int, padding: int) -> Any:
        slots = torch.from_numpy(self.slots(tokens)).unsqueeze(0)
        taken = self.runner.routed_experts_capturer.get_routed_experts(slots, tokens)
        return self.stored(taken.routing_data.numpy(), taken.slot_mapping.numpy(), tokens)
