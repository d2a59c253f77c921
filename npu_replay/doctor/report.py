"""Report what is installed, and what npu_replay has changed in it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from npu_replay import routers, tables
from npu_replay.compat import cuda, probe, torch_npu
from npu_replay.compat.mindspeed import adaptors
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.probe import Capability, Product
from npu_replay.compat.vllm import engine_plan as vllm
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend import releases as vllm_ascend
from npu_replay.seam import backward
from npu_replay.sessions.session import OpenSession, open_sessions
from npu_replay.tables import Part, Table


@dataclass(frozen=True)
class TorchFacts:
    """Holds facts about torch.

    Attributes:
        recompute_problem: why a recompute can't be told from a forward here; empty if it can.
        accelerator: the kind of device that torch has in this process, such as «npu»; empty if none.
        devices: the number of them.
    """

    version: str
    recompute_problem: str
    accelerator: str
    devices: int


@dataclass(frozen=True)
class AppliedPatch:
    """Describes one attribute of another module that npu_replay has replaced for now."""

    where: str
    why: str
    reason: str
    """The capability that is missing without it."""


@dataclass(frozen=True)
class Report:
    """Holds the findings of `report`. `str()` of it is for people; the fields are for programs."""

    version: str
    python: str
    torch: TorchFacts
    products: tuple[Product, ...]
    capabilities: tuple[Capability, ...]
    patches: tuple[AppliedPatch, ...]
    router_kinds: tuple[str, ...]
    open_sessions: tuple[OpenSession, ...]

    def __str__(self) -> str:
        return tables.as_text([*self.parts(), *self._process()])

    def parts(self) -> Iterator[Part]:
        """Yield what is installed and what it can do."""
        rows = [
            ("npu_replay", self.version, str(Path(__file__).parents[1])),
            ("torch", self.torch.version, str(Path(torch.__file__).parent)),
        ]
        for product in self.products:
            if product.problem:
                rows.append((product.name, "?", product.problem))
            elif product.installed:
                rows.append((product.name, product.version or "?", product.where))
        yield Table(("Installed", "Version", "Where"), rows)
        if absent := [
            product.name for product in self.products if not product.installed and not product.problem
        ]:
            yield f"Not installed: {', '.join(absent)}"
        yield ""
        states = [(capability.name, capability.state, capability.why) for capability in self.capabilities]
        yield Table(("What", "State", "Why"), states)

    def _process(self) -> Iterator[Part]:
        """Yield facts about this process. A name gets a line of its own, so that it can be copied."""
        yield ""
        yield f"Python: {self.python}"
        yield f"Routers that are recognised: {', '.join(self.router_kinds)}"
        yield f"Open blocks: {', '.join(map(str, self.open_sessions)) or 'none'}"
        yield f"Changed in other modules: {len(self.patches) or 'nothing'}"
        reason = ""
        for patch in self.patches:
            if patch.reason != reason:
                reason = patch.reason
                yield f"  for {reason}:"
            yield f"  - {patch.where}"
            yield f"    {patch.why}"


def report() -> Report:
    """Report what is installed, what works here, and what npu_replay has changed in other modules.

    Imports no product and changes nothing. It asks torch for its version, its autograd's facts and its
    accelerator.

    >>> print(npu_replay.report())
    Installed      Version     Where
    npu_replay     0.1.0 ...
    What                      State    Why
    replay on Megatron-core   ...
    """
    from npu_replay import __version__  # here: the package imports this module

    accelerator, devices = torch_npu.accelerator()
    facts = TorchFacts(torch.__version__, backward.probe() or "", accelerator, devices)
    products = probe.products()
    by_name = {product.name: product for product in products}
    megatron, ascend, engine = (by_name[name] for name in ("megatron-core", "vllm-ascend", "vllm"))
    recompute = Capability("recompute", "works", "each takes the routes of its own forward")
    if facts.recompute_problem:
        why = f"autograd doesn't tell whose recompute a call is: {facts.recompute_problem}"
        remedy = "use a torch that is tested, 2.7 to 2.15; until then recompute is refused"
        recompute = Capability("recompute", "missing", why, remedy)
    capabilities = [
        *probe.capabilities(products),
        *adaptors.capabilities(products),
        vllm.capability(engine, ascend),
        vllm_ascend.capability(ascend, engine.version),
        *([plugin.capability(ascend, engine)] if ascend.installed else []),
        recompute,
        Capability("CPU", "works", "always there"),
    ]
    if megatron.usable and accelerator != cuda.NAME:
        why = "npu_replay.compat.cpu.lend() lends what it asks of CUDA"
        capabilities.append(Capability("Megatron-core on the CPU", "shimmed", why))
    capabilities += [
        cuda.capability(accelerator, devices),
        torch_npu.capability(accelerator, devices, by_name[torch_npu.MODULE]),
    ]
    return Report(
        version=__version__,
        python=platform.python_version(),
        torch=facts,
        products=products,
        capabilities=tuple(capabilities),
        patches=tuple(AppliedPatch(patch.where, patch.why, reason) for reason, patch in patching.applied()),
        router_kinds=routers.kinds(),
        open_sessions=open_sessions(),
    )
