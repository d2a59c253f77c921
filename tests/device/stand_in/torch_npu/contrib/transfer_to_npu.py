"""torch.cuda's names mean the NPU from now on, and `torch.cuda.is_available()` says that there is CUDA.

The same effect as torch_npu's module of this name, as far as Megatron-core asks for it, in words of our own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


def _device(x: Any) -> Any:
    if isinstance(x, str):
        return x.replace("cuda", "npu")
    return torch.device("npu", x.index) if isinstance(x, torch.device) and x.type == "cuda" else x


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the NPU for every CUDA device that it is given."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_device, args), **{name: _device(value) for name, value in kwargs.items()})

    return call


for _name in vars(type(torch.npu)):
    if not _name.startswith("__"):
        setattr(torch.cuda, _name, getattr(torch.npu, _name))
torch.cuda.default_generators = (torch.default_generator,)
torch.cuda._lazy_call = lambda call, **_: call()
for _name in ("current_device", "get_rng_state", "set_rng_state", "manual_seed"):
    setattr(torch.cuda.random, _name, getattr(torch.npu, _name))
for _name in _FACTORIES:
    setattr(torch, _name, _moved(getattr(torch, _name)))
torch.Tensor.to = _moved(torch.Tensor.to)
torch.Tensor.cuda = lambda self, *_, **__: self.to("npu")
torch.nn.Module.to = _moved(torch.nn.Module.to)
torch.nn.Module.cuda = lambda self, *_: self.to("npu")
