"""Record, replay and recompute, once, with a small router in pure torch: so that «works» was seen.

    python -m npu_replay.doctor.self_test npu torch_npu

tries one device in a process of its own, where a broken driver harms nobody, and prints one line of JSON.
The second name is a package to import first, one that brings the device.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from npu_replay import routers
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.record import record
from npu_replay.sessions.replay import replay

_KIND = "npu_replay's self-test"
_LAYERS, _TOKENS, _HIDDEN, _EXPERTS, _TOPK = 2, 32, 16, 8, 2


@dataclass(frozen=True)
class Outcome:
    """How it went: `problem` is empty if all was as it should be."""

    device: str
    problem: str
    seconds: float


def run(device: str, brought_by: str = "") -> Outcome:
    """Record two micro-batches on `device`, change the router, and replay them with and without recompute.

    Args:
        device: its kind, as torch names it.
        brought_by: the package to import for it; none for torch's own devices.

    >>> run("cpu").problem
    ''
    """
    started = time.perf_counter()
    routers.register(_KIND, _ToyRouters())
    try:
        if brought_by:
            importlib.import_module(brought_by)
        module = getattr(torch, device, None)
        if module is None or not module.is_available():
            problem = f"torch finds no {device} device"
        else:
            problem = _problem(torch.device(device))
    except Exception as error:  # noqa: BLE001 - whatever fails here is the finding
        problem = f"{type(error).__name__}: {error}"
    finally:
        routers.unregister(_KIND)
    return Outcome(device, problem, time.perf_counter() - started)


def _problem(device: torch.device) -> str:
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    model = _ToyModel(generator).to(device)
    batches = [torch.randn(_TOKENS, _HIDDEN, generator=generator).to(device) for _ in range(2)]
    routes = _chosen(model, batches)
    with torch.no_grad():
        model.gates.neg_()
    if all(torch.equal(a.ids, b.ids) for a, b in zip(routes, _chosen(model, batches), strict=True)):
        return "the changed router still chooses the same experts, so this shows nothing"
    plain = _gradients(model, batches, routes, recompute=False)
    if not torch.equal(torch.stack([one.ids for one in routes]), model.chosen()):
        return "the routers didn't choose the experts that were replayed"
    again = _gradients(model, batches, routes, recompute=True)
    # Not to the last bit: a device may add in another order. Another expert's gradient is far off.
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, again, strict=True)):
        return "with recompute the gradients differ from those without"
    return ""


def _chosen(model: nn.Module, batches: list[torch.Tensor]) -> list[RoutedExperts]:
    with torch.no_grad(), record(model) as recording:
        for batch in batches:
            model(batch)
    routes: list[RoutedExperts] = recording.routes
    return routes


def _gradients(
    model: _ToyModel, batches: list[torch.Tensor], routes: list[RoutedExperts], *, recompute: bool
) -> list[torch.Tensor]:
    """One backward over the sum of the losses: a queue of recomputes would take the wrong one's routes."""
    model.zero_grad()
    model.recompute = recompute
    for router in model.routers:
        router.chosen.clear()
    with replay(model, routes):
        torch.stack([model(batch).square().mean() for batch in batches]).sum().backward()  # type: ignore[no-untyped-call]
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


class _ToyRouter(nn.Module):
    """Turns logits into values and ids, [tokens, topk] each."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(logits.softmax(dim=-1), _TOPK, dim=-1)
        self.chosen.append(ids.to("cpu", torch.uint8))
        return values, ids


class _ToyModel(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.routers = [_ToyRouter() for _ in range(_LAYERS)]
        self.layers = nn.ModuleList(self.routers)
        self.gates = nn.Parameter(torch.randn(_LAYERS, _EXPERTS, _HIDDEN, generator=generator))
        self.experts = nn.Parameter(torch.randn(_LAYERS, _EXPERTS, _HIDDEN, generator=generator))
        self.recompute = False

    def chosen(self) -> torch.Tensor:
        """What the routers chose, in their own words, [micro-batches, tokens, layers, topk]."""
        return torch.stack([torch.stack(router.chosen) for router in self.routers], dim=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number in range(_LAYERS):
            if self.recompute:
                hidden = checkpoint(self._layer, number, hidden, use_reentrant=False)
            else:
                hidden = self._layer(number, hidden)
        return hidden

    def _layer(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        values, ids = self.routers[number](hidden @ self.gates[number].t())
        weights = values.new_zeros(len(hidden), _EXPERTS).scatter(1, ids, values)
        output: torch.Tensor = hidden + (weights @ self.experts[number]).tanh()
        return output


class _ToyRouters(routers.RouterKind):
    def describe(self, module: nn.Module, path: str) -> routers.Router | None:
        if not isinstance(module, _ToyRouter):
            return None
        return routers.Router(
            module=module, num_experts=_EXPERTS, topk=_TOPK, shows=_shows, masks=False, path=path
        )


def _shows(output: Any) -> torch.Tensor:
    _, ids = output
    return torch.zeros(len(ids), _EXPERTS, dtype=torch.bool, device=ids.device).scatter(1, ids, True)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(run(*sys.argv[1:3]))) + "\n")
