"""What is here, and what npu_replay has changed in it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from npu_replay import routers
from npu_replay.compat import cuda, probe, torch_npu
from npu_replay.compat.mindspeed import features as mindspeed
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.probe import Capability, Product
from npu_replay.compat.vllm import launch as vllm
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend import releases as vllm_ascend
from npu_replay.sessions import backward
from npu_replay.sessions.session import OpenSession, open_sessions


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself.

    Attributes:
        recompute_problem: why a recompute can't be told from a forward here; empty if it can.
        accelerator: the kind of device that torch has in this process, «npu» for one; empty if none.
        devices: how many of them.
    """

    version: str
    recompute_problem: str
    accelerator: str
    devices: int


@dataclass(frozen=True)
class AppliedPatch:
    """One attribute of somebody else's that npu_replay has replaced for now."""

    where: str
    why: str
    reason: str
    """The capability that was missing without it."""


@dataclass(frozen=True)
class Report:
    """What `report` found. `str()` of it is for people; the fields are for programs."""

    version: str
    python: str
    torch: TorchFacts
    products: tuple[Product, ...]
    capabilities: tuple[Capability, ...]
    patches: tuple[AppliedPatch, ...]
    router_kinds: tuple[str, ...]
    open_sessions: tuple[OpenSession, ...]

    @property
    def absent(self) -> str:
        """The names of the products that aren't here, nor broken."""
        return ", ".join(one.name for one in self.products if not one.found and not one.problem)

    def __str__(self) -> str:
        installed = [_line(product) for product in self.products if product.found or product.problem]
        return "\n".join(
            [
                f"npu_replay {self.version}, Python {self.python}, torch {self.torch.version}",
                *_section("Installed", installed),
                *_section("Not installed", [self.absent] if self.absent else []),
                *_section("What works", [_capability(capability) for capability in self.capabilities]),
                *_section("Routers that are recognised", [", ".join(self.router_kinds)]),
                *_section(
                    "Changed in other modules",
                    [f"{patch.where}: {patch.why} ({patch.reason})" for patch in self.patches],
                ),
                *_section("Open blocks", [str(block) for block in self.open_sessions]),
            ]
        )


def report() -> Report:
    """Report what is installed, what works here, and what npu_replay has changed in other modules.

    Imports no product and changes nothing. Asked of torch: its version, what its autograd tells, and which
    accelerator it has.

    >>> print(npu_replay.report())
    npu_replay 0.1.0, Python ...
    Installed:
      numpy ...
    What works:
      replay on Megatron-core: ...
    """
    from npu_replay import __version__  # here: the package imports this module

    facts = torch_facts()
    products = probe.products()
    by_name = {product.name: product for product in products}
    return Report(
        version=__version__,
        python=platform.python_version(),
        torch=facts,
        products=products,
        capabilities=(
            *probe.capabilities(products),
            mindspeed.capability(*(by_name[name] for name in ("mindspeed", "megatron-core"))),
            vllm.capability(by_name["vllm"], by_name["vllm-ascend"]),
            vllm_ascend.capability(by_name["vllm-ascend"], by_name["vllm"].version),
            *_captures(by_name["vllm-ascend"], by_name["vllm"]),
            _recompute(facts),
            *_devices(facts, products),
        ),
        patches=tuple(AppliedPatch(patch.where, patch.why, reason) for reason, patch in patching.applied()),
        router_kinds=routers.kinds(),
        open_sessions=open_sessions(),
    )


def torch_facts() -> TorchFacts:
    """Ask torch what it has in this process."""
    accelerator, devices = torch_npu.accelerator()
    return TorchFacts(torch.__version__, backward.probe() or "", accelerator, devices)


def _captures(ascend: Product, vllm_beside: Product) -> tuple[Capability, ...]:
    """Of the plug-in, where there is something that it could capture on."""
    return (plugin.capability(ascend, vllm_beside),) if ascend.found else ()


def _recompute(facts: TorchFacts) -> Capability:
    if facts.recompute_problem:
        return Capability(
            "recompute",
            "missing",
            f"autograd doesn't tell whose recompute a call is: {facts.recompute_problem}",
            "use a torch that is tested, 2.7 to 2.15; until then recompute is refused",
        )
    return Capability("recompute", "works", "each takes the routes of its own forward")


def _devices(facts: TorchFacts, products: tuple[Product, ...]) -> tuple[Capability, ...]:
    """The CPU and the accelerators, as far as this process knows without importing anything for them."""
    by_name = {product.name: product for product in products}
    lent = Capability(
        "Megatron-core on the CPU", "shimmed", "npu_replay.compat.cpu.lend() lends what it asks of CUDA"
    )
    return (
        Capability("CPU", "works", "always there"),
        *([lent] if by_name["megatron-core"].usable and facts.accelerator != cuda.NAME else []),
        cuda.capability(facts.accelerator, facts.devices),
        torch_npu.capability(facts.accelerator, facts.devices, by_name[torch_npu.MODULE]),
    )


def _line(product: Product) -> str:
    parts = [product.name, product.version, f"in {product.where}" if product.where else ""]
    line = " ".join(part for part in parts if part)
    return f"{line}: {product.problem}" if product.problem else line


def _capability(capability: Capability) -> str:
    remedy = f" -> {capability.remedy}" if capability.remedy else ""
    return f"{capability.name}: {capability.state} ({capability.why}){remedy}"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else [f"{title}: nothing"]
