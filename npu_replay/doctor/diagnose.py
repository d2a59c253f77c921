"""Find out whether routing replay works on this machine, by trying it, and what to do where it doesn't.

    python -m npu_replay.doctor.diagnose MODULE ...

imports modules as a job does, npu_replay first, and prints one line of JSON. doctor runs it in another
process, since missing or renamed parts of a module show only in its import.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from npu_replay.compat import probe, torch_npu
from npu_replay.compat.mindspeed import adaptors
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.devices import ACCELERATORS
from npu_replay.doctor import self_test
from npu_replay.doctor.report import Report, report
from npu_replay.errors import ReplayError
from npu_replay.tables import Part, Table

_MEGATRON = probe.MEGATRON
_TRANSFORMERS = probe.TRANSFORMERS
_PRODUCTS = {
    adaptors.UNDER_ADAPTOR: probe.ADAPTOR,
    adaptors.UNDER_MINDSPEED: "mindspeed",
    _MEGATRON: "megatron-core",
    _TRANSFORMERS: "transformers",
}
"""Maps each of these capabilities to its product."""
_NEED = {
    _MEGATRON: ("Megatron's own replay", "Megatron-core on the CPU", *adaptors.MODULES),
    adaptors.UNDER_ADAPTOR: (adaptors.UNDER_MINDSPEED,),
    adaptors.UNDER_MINDSPEED: (),
}
"""Maps a capability to those that are lost with it."""
_ROUTER = "megatron.core.transformer.moe.router"
_QWEN = "transformers.models.qwen3_moe.modeling_qwen3_moe"
_ACCELERATORS = {device.NAME: device for device in ACCELERATORS}
_REFUSED = "can't be replayed: "
_OURS = "this is a fault of npu_replay or of this torch: please report it, with npu-replay doctor --json"
_PATIENCE = 120  # seconds; the first NPU kernel takes tens of them to compile


@dataclass(frozen=True)
class Diagnosis:
    """Holds the findings of doctor.

    Attributes:
        report: as `npu_replay.report` gives it, updated with what was tried.
        trials: by device, why the self-test failed; empty where it didn't.
        faults: why replay can't work here; empty if it works.
    """

    report: Report
    trials: dict[str, str]
    faults: tuple[Capability, ...]

    @property
    def works(self) -> bool:
        return not self.faults

    def to_json(self) -> str:
        tried = [{"device": device, "problem": problem} for device, problem in self.trials.items()]
        faults = [asdict(fault) for fault in self.faults]
        about = {"works": self.works} | asdict(self.report) | {"self_test": tried, "faults": faults}
        return json.dumps(about, indent=2)

    def parts(self) -> Iterator[Part]:
        yield from self.report.parts()
        remedies_of_faults = " ".join(fault.remedy for fault in self.faults)
        capabilities = self.report.capabilities
        if remedies := [
            (capability.name, capability.remedy)
            for capability in capabilities
            if capability.remedy not in remedies_of_faults
        ]:
            yield ""
            yield Table(("If you need it", "Do this"), remedies)
        yield ""
        if self.works:
            there = [
                capability.name
                for capability in capabilities
                if capability.there and capability.name in (_MEGATRON, _TRANSFORMERS)
            ]
            where = " and ".join(name.removeprefix("replay ") for name in there)
            devices = " and ".join(device.upper() for device in self.trials)
            yield f"Replay works here: {where}; tried with a small router, with recompute, on {devices}."
        else:
            yield "Replay does not work here:"
            for fault in self.faults:
                yield f"- {fault.name}: {fault.why}"
                yield f"  {fault.remedy}"


def diagnose(*, imports: bool = False) -> Diagnosis:
    """Look, import Megatron-core, and try record, replay and recompute on every device.

    Args:
        imports: also import transformers, in another process as Megatron-core, which takes some seconds and
            finds what the framework itself lacks.
    """
    here = report()
    capabilities = {capability.name: capability for capability in here.capabilities}
    trials = {"cpu": self_test.run("cpu")}
    for kind, accelerator in _ACCELERATORS.items():
        brought = any(product.name == accelerator.MODULE and product.usable for product in here.products)
        if brought or here.torch.accelerator == kind:
            trials[kind] = _try(self_test.__name__, kind, accelerator.MODULE)
    for kind, problem in trials.items():
        remedy = "" if not problem else _ACCELERATORS[kind].remedy() if kind in _ACCELERATORS else _OURS
        why = problem or "tried: recorded, replayed, recomputed"
        capabilities[kind.upper()] = Capability(kind.upper(), "broken" if problem else "works", why, remedy)

    def put(name: str, problem: str, modules: tuple[str, ...]) -> None:
        if not problem:
            capabilities[name] = replace(capabilities[name], why=f"{capabilities[name].why}; imports")
            return
        product = next(product for product in here.products if product.name == _PRODUCTS[name])
        remedy = f"python -c 'import {', '.join(modules)}' has to work with what is in {product.where}"
        if problem.startswith(_REFUSED):
            remedy = "take a release that npu_replay knows (docs/versions.md); NPU_REPLAY_STRICT=off goes on"
        elif "megatron.training" in problem:
            remedy = "put a Megatron-LM source tree first on PYTHONPATH: a wheel has no megatron.training"
        says = f"{product.name} {product.version}".rstrip()  # MindSpeed's source has none
        capabilities[name] = Capability(name, "broken", f"{says} {problem}", remedy)

    if capabilities[_MEGATRON].there:
        layers = [name for name in adaptors.MODULES if capabilities[name].there]
        for name, problem, modules in _import_as_jobs_do(layers):
            put(name, problem, modules)
            for other in _NEED[name] if problem else ():
                if other in capabilities and capabilities[other].there:
                    capabilities[other] = Capability(other, "missing", f"{name} is broken")
    if imports and capabilities[_TRANSFORMERS].there:
        put(_TRANSFORMERS, _try(__name__, _QWEN), (_QWEN,))
    # The capabilities without which replay fails; other missing ones only affect what needs them.
    decisive = {*_PRODUCTS, "CPU", *(kind.upper() for kind in _ACCELERATORS)}
    if plugin.wanted():
        decisive.add(plugin.CAPABILITY)
    every = tuple(capabilities.values())
    faults = [
        capability
        for capability in every
        if (capability.name in decisive and capability.state == "broken")
        or (capability.name == "recompute" and not capability.there)
    ]
    frameworks = [capability for capability in every if capability.name in (_MEGATRON, _TRANSFORMERS)]
    if not any(capability.there for capability in frameworks):
        remedy = "; or ".join(capability.remedy for capability in frameworks)
        faults.append(Capability("routers", "missing", "no framework whose routers are recognised", remedy))
    return Diagnosis(replace(here, capabilities=every), trials, tuple(faults))


def _import_as_jobs_do(layers: list[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Import Megatron after what adapts it; yield each capability whose product is at fault, and Megatron's.

    Yields the capability, the problem, which is empty for a Megatron that imports, and the modules in their
    order. A layer is at fault if the import goes well without it, or fails in another way.

    Args:
        layers: capabilities of what adapts Megatron, in the order of import.
    """
    modules = (*(adaptors.MODULES[name] for name in layers), _ROUTER)
    problem = _try(__name__, *modules)
    for count in reversed(range(len(layers))) if problem else ():
        fewer = (*modules[:count], _ROUTER)
        without = _try(__name__, *fewer)
        if without != problem:
            yield layers[count], problem, modules
        modules = fewer
        problem = without
        if not problem:
            break
    yield _MEGATRON, problem, modules


def _try(module: str, *arguments: str) -> str:
    """Run a module that prints {"problem": ...} in another process, which it may hang or kill."""
    # torch_npu is imported explicitly: its autoload by `import torch` would hide why it fails.
    variables = os.environ | {torch_npu.AUTOLOAD: "0"}
    try:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(
            command,
            env=variables,
            timeout=_PATIENCE,
            text=True,
            errors="replace",
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE} s"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    printed = done.stdout.strip().splitlines()
    complaint = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}"
    if done.returncode or not printed:
        return complaint[-1] if complaint else f"the process ended with status {done.returncode}"
    try:
        return str(json.loads(printed[-1])["problem"])
    except (ValueError, KeyError, TypeError):
        return f"the process printed {printed[-1]!r}"


def _import(modules: Iterable[str]) -> str:
    """Import these modules in order; return why the first fails, or why npu_replay can't change them."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a product may raise anything
        first_line = str(error).strip().splitlines()[:1]
        return f"doesn't import: {': '.join([type(error).__name__, *first_line])}"
    try:
        import_hook.refuse_failures()
    except ReplayError as error:
        return f"{_REFUSED}{error.problem}"
    return ""


if __name__ == "__main__":
    wanted = sys.argv[1:]  # MindSpeed parses argv
    sys.argv = sys.argv[:1]
    sys.stdout.write("\n" + json.dumps({"problem": _import(wanted)}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # skip exit handlers: a crash there isn't a failed import
