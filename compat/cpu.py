"""Lends Megatron-core what it asks of CUDA on a machine without CUDA.

    with npu_replay.compat.cpu.lend():
        model = GPTModel(...)          # built, run and trained on the CPU

What it is was found by running Megatron-core 0.12 to 0.19 on a CPU; docs/dev/megatron.md has the config.

Asks:     whether there is CUDA; with it one name is missing, where there is no Transformer Engine.
Changes:  names of `torch.cuda`, factories of torch, gloo's collectives, Megatron's CUDA generator.
Undone:   when the block ends.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.compat import probe
from npu_replay.compat.patching.patches import Patches
from npu_replay.seam import torch_state

CPU = torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a CPU has nothing to wait for."""


class Event:
    """Stands in for an event that has happened."""

    record = wait = synchronize = _nothing

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """Stands in for a device's only stream. A class, since transformers names it in type hints."""

    cuda_stream = 0
    device = CPU
    wait_stream = wait_event = synchronize = __exit__ = _nothing

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else Event()

    def query(self) -> bool:
        return True


_STREAM = Stream()
_FACTORIES = "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like"


@contextlib.contextmanager
def lend() -> Iterator[None]:
    """Lend Megatron-core what it asks of CUDA, for the length of the block. Blocks may be nested.

    >>> with npu_replay.compat.cpu.lend():
    ...     torch.ones(2, device="cuda").cuda().sum().item()
    2.0
    """
    # An outer block lends already.
    if vars(torch.cuda)["Stream"] is Stream:
        yield
        return
    patches = Patches("Megatron-core runs without CUDA")
    dynamo_knew = torch_state.dynamo_knows()
    try:
        if not torch.cuda.is_available():
            _lend_torch(patches)
            _lend_distributed(patches)
        _lend_megatron(patches)
        yield
    finally:
        patches.undo()
        if not dynamo_knew:
            torch_state.dynamo_forgets()


def _lend_torch(patches: Patches) -> None:
    for name, value in {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "synchronize": _nothing,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "default_generators": (torch.default_generator,),
    }.items():
        patches.set(torch.cuda, name, value, "there is no CUDA device to ask")
    patches.set(torch.Tensor, "cuda", lambda self, *_, **__: self, "tensors are where they belong already")

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a factory: device="cuda" becomes the CPU, and pinned memory is ignored."""

        def build(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return build

    for name in _FACTORIES:
        patches.set(torch, name, on_cpu(getattr(torch, name)), 'Megatron asks for device="cuda" by name')


def _lend_distributed(patches: Patches) -> None:
    """Adapt gloo's collectives to Megatron's calls, in which ranks have different numbers of tokens."""
    exchange = dist.all_to_all_single
    gather = dist.all_gather

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        splits: list[Any] = [
            None if sizes is None else [int(size) for size in sizes]
            for sizes in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, input, *splits, **kwargs)

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if _even(tensor_list):
            return gather(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(map(len, tensor_list)), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        whole = [torch.empty_like(padded) for _ in tensor_list]
        gather(whole, padded, group)
        for part, padded_part in zip(tensor_list, whole, strict=True):
            part.copy_(padded_part[: len(part)])
        return None

    def reduce_scatter(
        output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        total = torch.cat(list(input_list))
        if _even(input_list):
            return dist.reduce_scatter_tensor(output, total, op, group, async_op)
        dist.all_reduce(total, op, group)
        first = sum(map(len, input_list[: dist.get_rank(group)]))
        output.copy_(total[first : first + len(output)])
        return None

    patches.set(dist, "all_to_all_single", all_to_all_single, "gloo wants split sizes as a list of int")
    why = "gloo wants all ranks' parts equally long"
    patches.set(dist, "all_gather", all_gather, why)
    patches.set(dist, "reduce_scatter", reduce_scatter, why + ", and before torch 2.8 takes no list of them")


def _even(parts: Any) -> bool:
    return len({len(part) for part in parts}) == 1


def _lend_megatron(patches: Patches) -> None:
    """Lend the CPU's generator, and a name that Megatron 0.13 and later lack without Transformer Engine."""
    random = _module("megatron.core.tensor_parallel.random")
    if random is not None and not torch.cuda.is_available():
        why = "Megatron's CUDA generator is the CPU's here"
        patches.set(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), why)
        patches.set(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state), why)
    moe = _module("megatron.core.transformer.moe.moe_utils")
    if moe is not None and hasattr(moe, "RouterGatingLinearFunction") and not hasattr(moe, "te_general_gemm"):
        patches.set(moe, "te_general_gemm", None, "undefined in 0.13 and later without Transformer Engine")


def _module(name: str) -> Any:
    """Import a part of Megatron; None if Megatron isn't there."""
    return None if probe.find(name) is None else importlib.import_module(name)
