"""Find out whether routing replay works on this machine, by trying it, and what to do where it doesn't.

    python -m npu_replay.doctor.diagnose MODULE ...

imports modules as a job does, npu_replay first, and prints one line of JSON. doctor runs it in a process of
its own: what is missing or renamed inside a module shows only when it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from npu_replay import environment
from npu_replay.compat import probe, torch_npu
from npu_replay.compat.mindspeed import features as mindspeed
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability
from npu_replay.devices import ACCELERATORS
from npu_replay.doctor import self_test
from npu_replay.doctor.report import Report, report
from npu_replay.errors import ReplayError
from npu_replay.tables import Part, Table

_MEGATRON, _TRANSFORMERS = probe.MEGATRON, "replay on transformers"
_PRODUCTS = {mindspeed.CAPABILITY: "mindspeed", _MEGATRON: "megatron-core", _TRANSFORMERS: "transformers"}
"""What each of these capabilities is of."""
_NEED_MEGATRON = ("Megatron's own replay", "Megatron-core on the CPU")
_ADAPTOR = "mindspeed.megatron_adaptor"  # before Megatron, which it changes as it is imported
_ROUTER = "megatron.core.transformer.moe.router"
_QWEN = "transformers.models.qwen3_moe.modeling_qwen3_moe"
_ACCELERATORS = {device.NAME: device for device in ACCELERATORS}
_OURS = "this is a fault of npu_replay or of this torch: please report it, with npu-replay doctor --json"
_PATIENCE = 120  # seconds; a first NPU kernel is compiled for tens of them


@dataclass(frozen=True)
class Attempt:
    """How an import or a self-test went.

    Attributes:
        problem: why it failed; empty if it didn't.
        refusal: what npu_replay couldn't change, for which every block is refused; empty if all is well.
    """

    problem: str = ""
    refusal: str = ""

    @property
    def fatal(self) -> bool:
        """Does it stop a job with the settings that are here?"""
        return bool(self.problem or (self.refusal and environment.strict()))


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found.

    Attributes:
        report: as `npu_replay.report` gives it, with what was tried instead of what was only looked up.
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
        """Return all of it, for programs."""
        tried = [{"device": device, "problem": problem} for device, problem in self.trials.items()]
        faults = [asdict(one) for one in self.faults]
        about = {"works": self.works} | asdict(self.report) | {"self_test": tried, "faults": faults}
        return json.dumps(about, indent=2)

    def parts(self) -> Iterator[Part]:
        """Yield the report, what to do about what is missing, and the verdict: tables and lines."""
        yield from self.report.parts()
        told = " ".join(fault.remedy for fault in self.faults)
        found = self.report.capabilities
        if remedies := [(one.name, (one.remedy, "cyan")) for one in found if one.remedy not in told]:
            yield ""
            yield Table(("If you need it", "Do this"), remedies)
        yield ""
        if self.works:
            there = [one.name.removeprefix("replay ") for one in found if one.there and _is_framework(one)]
            devices = " and ".join(device.upper() for device in self.trials)
            tried = f"tried with a small router, with recompute, on {devices}"
            yield f"Replay works here: {' and '.join(there)}; {tried}.", "bold green"
        else:
            yield "Replay does not work here:", "bold red"
            for fault in self.faults:
                yield f"- {fault.name}: {fault.why}"
                yield f"  {fault.remedy}", "cyan"


def diagnose(*, imports: bool = False) -> Diagnosis:
    """Look, import Megatron-core, and try record, replay and recompute on every device that is here.

    Args:
        imports: also import transformers. As Megatron-core it is imported in a process of its own, which
            takes some seconds and finds what the framework itself lacks.
    """
    found = report()
    capabilities = {one.name: one for one in found.capabilities}
    trials = {"cpu": self_test.run("cpu")}
    for kind, accelerator in _ACCELERATORS.items():
        brought = any(one.name == accelerator.MODULE and one.usable for one in found.products)
        if brought or found.torch.accelerator == kind:
            trials[kind] = _try(self_test.__name__, kind, accelerator.MODULE).problem
    for kind, problem in trials.items():
        remedy = "" if not problem else _ACCELERATORS[kind].remedy() if kind in _ACCELERATORS else _OURS
        why = problem or "tried: recorded, replayed, recomputed"
        capabilities[kind.upper()] = Capability(kind.upper(), "broken" if problem else "works", why, remedy)
    if capabilities[_MEGATRON].there:
        _import_megatron(capabilities, found)
    if imports and capabilities[_TRANSFORMERS].there:
        _put(capabilities, _TRANSFORMERS, found, _try(__name__, _QWEN), (_QWEN,))
    faults = tuple(_faults(capabilities.values()))
    return Diagnosis(replace(found, capabilities=tuple(capabilities.values())), trials, faults)


def _import_megatron(capabilities: dict[str, Capability], found: Report) -> None:
    """Put what comes of importing Megatron-core into `capabilities`: with MindSpeed, as jobs there do."""
    under = capabilities[mindspeed.CAPABILITY].there
    modules: tuple[str, ...] = (_ADAPTOR, _ROUTER) if under else (_ROUTER,)
    trial = _try(__name__, *modules)
    if trial.fatal and under and not (alone := _try(__name__, _ROUTER)).fatal:
        _put(capabilities, mindspeed.CAPABILITY, found, trial, modules)
        trial, modules = alone, (_ROUTER,)
    _put(capabilities, _MEGATRON, found, trial, modules)
    for other in _NEED_MEGATRON:
        if not capabilities[_MEGATRON].there and other in capabilities and capabilities[other].there:
            capabilities[other] = Capability(other, "missing", f"{_MEGATRON} is broken")


def _put(
    capabilities: dict[str, Capability], name: str, found: Report, trial: Attempt, modules: Iterable[str]
) -> None:
    """Put what an import shows of a capability into `capabilities`."""
    capability = capabilities[name]
    if not trial.fatal:
        but = f", but NPU_REPLAY_STRICT=0 goes on though {trial.refusal}" if trial.refusal else ""
        capabilities[name] = replace(capability, why=f"{capability.why}; imports{but}")
        return
    product = next(one for one in found.products if one.name == _PRODUCTS[name])
    why = [f"doesn't import: {trial.problem}"] if trial.problem else []
    why += [f"can't be replayed: {trial.refusal}"] if trial.refusal else []
    says = f"{product.name} {product.version}".rstrip()  # MindSpeed's source has none
    remedy = "take a release that npu_replay knows (docs/versions.md); NPU_REPLAY_STRICT=0 goes on without"
    if trial.problem:
        remedy = f"python -c 'import {', '.join(modules)}' has to work with what is in {product.where}"
    capabilities[name] = Capability(name, "broken", f"{says} {'; '.join(why)}", remedy)


def _faults(found: Iterable[Capability]) -> Iterator[Capability]:
    """Yield what makes replay fail or can't be trusted; what else is missing only loses what needs it."""
    decisive = {*_PRODUCTS, "CPU", *(kind.upper() for kind in _ACCELERATORS)}
    for one in found:
        lost = one.name == "recompute" and not one.there
        if lost or (one.name in decisive and one.state == "broken"):
            yield one
    frameworks = [one for one in found if _is_framework(one)]
    if not any(one.there for one in frameworks):
        remedy = "; or ".join(one.remedy for one in frameworks)
        yield Capability("routers", "missing", "no framework whose routers are recognised", remedy)


def _is_framework(one: Capability) -> bool:
    return one.name in (_MEGATRON, _TRANSFORMERS)


def _try(module: str, *arguments: str) -> Attempt:
    """Run a module that prints an Attempt as JSON, in a process of its own, which it may hang or kill."""
    # torch_npu is imported on purpose, and not by `import torch`, which would hide why it fails.
    variables = os.environ | {torch_npu.AUTOLOAD: "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=variables,
            timeout=_PATIENCE,
            text=True,
            errors="replace",
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Attempt(f"no answer within {_PATIENCE} s")
    except OSError as error:
        return Attempt(f"{type(error).__name__}: {error}")
    printed, complaint = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    if done.returncode < 0:
        return Attempt(f"the process was killed by signal {-done.returncode}")
    if done.returncode or not printed:
        return Attempt(complaint[-1] if complaint else f"the process ended with status {done.returncode}")
    try:
        return Attempt(**json.loads(printed[-1]))
    except (ValueError, TypeError):
        return Attempt(f"the process printed {printed[-1]!r}")


def _import(modules: Iterable[str]) -> Attempt:
    """Import these modules into this process, one after the other, up to the first that fails."""
    problem = refusal = ""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a product may raise anything
        says = str(error).strip()
        problem = f"{type(error).__name__}: {says.splitlines()[0]}" if says else type(error).__name__
    os.environ.pop(environment.STRICT, None)  # whoever asks is told, and judges
    try:
        import_hook.refuse_failures()
    except ReplayError as error:
        refusal = error.problem
    return Attempt(problem, refusal)


if __name__ == "__main__":
    wanted, sys.argv = sys.argv[1:], sys.argv[:1]  # MindSpeed takes what it finds there for its own
    sys.stdout.write("\n" + json.dumps(asdict(_import(wanted))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at once: what a product prints, or how it crashes, at exit is no matter of its import
