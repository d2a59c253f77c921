"""Record, replay and recompute once with a small router in pure torch, so that «works» was tested.

    python -m npu_replay.doctor.self_test npu torch_npu

tries one device in another process, isolated from a broken driver, and prints one line of JSON. The second
name is a package to import first, which provides the device.
"""

from __future__ import annotations

import importlib
import json
import sys
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from npu_replay import routers
from npu_replay.routes.mismatch import compare
from npu_replay.sessions.observe import observe
from npu_replay.sessions.record import record
from npu_replay.sessions.replay import replay

_KIND = "npu_replay's self-test"
_TOKENS = 32
_HIDDEN = 16
_VOCABULARY = 512
_EXPERTS = 8
_TOPK = 2


def run(device: str, brought_by: str = "") -> str:
    """Record two micro-batches on `device`, change the router, and replay them with and without recompute.

    Returns what went wrong, empty if nothing did. `brought_by` is a package to import first for the device.

    >>> run("cpu")
    ''
    """
    routers.register(_KIND, _ToyRouters())
    try:
        if brought_by:
            importlib.import_module(brought_by)
        module = getattr(torch, device, None)
        if module is None or not module.is_available():
            return f"torch finds no {device} device"
        return _problem(torch.device(device))
    except Exception as error:  # noqa: BLE001 - whatever fails here is the finding
        return f"{type(error).__name__}: {error}"
    finally:
        routers.unregister(_KIND)


def _problem(device: torch.device) -> str:
    generator = torch.Generator(device="cpu").manual_seed(0)  # leaves the global generator unchanged
    model = _ToyModel(generator).to(device)
    batches = [
        torch.randint(_VOCABULARY, (1, _TOKENS), generator=generator, device="cpu").to(device)
        for _ in range(2)
    ]

    with torch.no_grad():
        with record(model) as recording:
            for batch in batches:
                model(input_ids=batch)
        model.gate.neg_()  # another choice for each token
    gradients = []
    for model.recompute in (False, True):
        model.zero_grad()
        with observe(model) as observation, replay(model, recording.routes):
            # One backward for both: an implementation that queues recomputes would swap their routes.
            torch.stack([model(input_ids=batch).square().mean() for batch in batches]).sum().backward()  # type: ignore[no-untyped-call]
        if compare(observation.shown, recording.routes).router_mismatch:
            return "the routers didn't choose the experts that were replayed"
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    # Not bit-equal, since a device may add in another order; another expert's gradient is far off.
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*gradients, strict=True)):
        return "with recompute the gradients differ from those without"
    return ""


class _ToyRouter(nn.Module):
    """Maps logits to values and ids, [tokens, topk] each."""

    def forward(self, logits: torch.Tensor) -> Any:
        return torch.topk(logits.softmax(dim=-1), _TOPK, dim=-1)


class _ToyModel(nn.Module):
    """Implements one MoE layer, with experts of one vector each."""

    embedding: torch.Tensor

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer(
            "embedding", torch.randn(_VOCABULARY, _HIDDEN, generator=generator, device="cpu")
        )
        self.router = _ToyRouter()
        self.gate = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, generator=generator, device="cpu"))
        self.experts = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, generator=generator, device="cpu"))
        self.recompute = False

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embedding[input_ids[0]]
        if self.recompute:
            return checkpoint(self._layer, hidden, use_reentrant=False)
        return self._layer(hidden)

    def _layer(self, hidden: torch.Tensor) -> Any:
        values, ids = self.router(hidden @ self.gate.t())
        weights = values.new_zeros(len(hidden), _EXPERTS).scatter(1, ids, values)
        return hidden + (weights @ self.experts).tanh()


class _ToyRouters(routers.RouterKind):
    def describe(self, module: nn.Module, path: str) -> routers.Router | None:
        if not isinstance(module, _ToyRouter):
            return None
        about: dict[str, Any] = {"num_experts": _EXPERTS, "topk": _TOPK, "shows": itemgetter(1)}
        return routers.Router(module=module, masks=False, **about)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"problem": run(*sys.argv[1:3])}) + "\n")
