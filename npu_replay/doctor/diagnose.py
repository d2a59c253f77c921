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
from pathlib import Path
from typing import Any, TypeVar

from npu_replay import environment, options
from npu_replay.compat import probe, torch_npu
from npu_replay.compat.mindspeed import features as mindspeed
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability, Product
from npu_replay.devices import ACCELERATORS
from npu_replay.doctor import self_test
from npu_replay.doctor.report import Report, report
from npu_replay.doctor.self_test import Outcome
from npu_replay.errors import ReplayError
from npu_replay.tables import Part, Table, print_json, show

_Answer = TypeVar("_Answer")

_MEGATRON, _TRANSFORMERS = probe.MEGATRON, "replay on transformers"
_PRODUCTS = {mindspeed.CAPABILITY: "mindspeed", _MEGATRON: "megatron-core", _TRANSFORMERS: "transformers"}
"""What each of these capabilities is of."""
_NEED_MEGATRON = ("Megatron's own replay", "Megatron-core on the CPU")
_ADAPTOR = "mindspeed.megatron_adaptor"  # before Megatron, which it changes as it is imported
_ROUTER = "megatron.core.transformer.moe.router"
_QWEN = "transformers.models.qwen3_moe.modeling_qwen3_moe"
_ACCELERATORS = {device.NAME: device for device in ACCELERATORS}
_PATIENCE = 120  # seconds; a first NPU kernel is compiled for tens of them


@dataclass(frozen=True)
class Fault:
    """Why replay can't work here, and what to do about it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Trial:
    """How an import went.

    Attributes:
        problem: the error that an import raised; empty if none did.
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
        trials: how the self-test went on each device.
        faults: why replay can't work here; empty if it works.
    """

    report: Report
    trials: tuple[Outcome, ...]
    faults: tuple[Fault, ...]

    @property
    def works(self) -> bool:
        return not self.faults

    def to_json(self) -> str:
        """Return all of it, for programs."""
        about = asdict(self.report) | {"self_test": [asdict(one) for one in self.trials]}
        faults = [asdict(one) for one in self.faults]
        return json.dumps({"works": self.works} | about | {"faults": faults}, indent=2)


def diagnose(*, imports: bool = False) -> Diagnosis:
    """Look, import Megatron-core, and try record, replay and recompute on every device that is here.

    Args:
        imports: also import transformers. As Megatron-core it is imported in a process of its own, which
            takes some seconds and finds what the framework itself lacks.
    """
    found = report()
    trials = {"cpu": self_test.run("cpu")}
    for kind, device in _ACCELERATORS.items():
        brought = bool(device.MODULE) and _product(found, device.MODULE).usable
        if brought or found.torch.accelerator == kind:
            trials[kind] = _try_device(kind)
    capabilities = {one.name: _tried(one, trials) for one in found.capabilities}
    _import_megatron(capabilities, found)
    if imports and capabilities[_TRANSFORMERS].there:
        _put(capabilities, _TRANSFORMERS, found, _try_import(_QWEN), (_QWEN,))
    faults = tuple(_faults(capabilities))
    found = replace(found, capabilities=tuple(capabilities.values()))
    return Diagnosis(found, tuple(trials.values()), faults)


# What is tried


def _try_device(device: str) -> Outcome:
    """The self-test in a process of its own: a driver may hang or kill it, and torch_npu may not import."""
    found = _asked(Outcome, self_test.__name__, device, _ACCELERATORS[device].MODULE)
    return Outcome(device, found, 0.0) if isinstance(found, str) else found


def _try_import(*modules: str) -> Trial:
    """Import these in a process of its own: they may kill it, and this one has to go on without them."""
    found = _asked(Trial, __name__, *modules)
    return Trial(found) if isinstance(found, str) else found


def _asked(kind: type[_Answer], module: str, *arguments: str) -> _Answer | str:
    """Return what a module of ours answers in a process of its own, or why it doesn't."""
    last, problem = _child([sys.executable, "-m", module, *arguments])
    try:
        return problem or kind(**json.loads(last))
    except (ValueError, TypeError):
        return f"the process printed {last!r}"


def _child(command: list[str]) -> tuple[str, str]:
    """Return the last line that a command printed, and why it failed (empty if it didn't)."""
    # torch_npu is imported on purpose, and not by `import torch`, which would hide why it fails.
    variables = os.environ | {torch_npu.AUTOLOAD: "0"}
    about: dict[str, Any] = {"text": True, "errors": "replace", "capture_output": True, "check": False}
    try:
        done = subprocess.run(command, env=variables, timeout=_PATIENCE, **about)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PATIENCE} s"
    except OSError as error:
        return "", f"{type(error).__name__}: {error}"
    printed, complaint = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    if done.returncode < 0:
        return "", f"the process was killed by signal {-done.returncode}"
    if done.returncode or not printed:
        return "", complaint[-1] if complaint else f"the process ended with status {done.returncode}"
    return printed[-1], ""


def _tried(capability: Capability, trials: dict[str, Outcome]) -> Capability:
    """A device's capability as its trial has it."""
    trial = trials.get(capability.name.lower())
    if trial is None:
        return capability
    if not trial.problem:
        why = f"tried: recorded, replayed, recomputed, {trial.seconds:.2f} s"
        return replace(capability, state="works", why=why, remedy="")
    remedy = "this is a fault of npu_replay or of this torch: please report it, with npu-replay doctor --json"
    if trial.device in _ACCELERATORS:
        remedy = _ACCELERATORS[trial.device].remedy()
    return replace(capability, state="broken", why=trial.problem, remedy=remedy)


def _import_megatron(capabilities: dict[str, Capability], found: Report) -> None:
    """Put what comes of importing Megatron-core into `capabilities`: with MindSpeed, as jobs there do."""
    if not capabilities[_MEGATRON].there:
        return
    under = capabilities[mindspeed.CAPABILITY].there
    modules: tuple[str, ...] = (_ADAPTOR, _ROUTER) if under else (_ROUTER,)
    trial = _try_import(*modules)
    if trial.fatal and under and not (alone := _try_import(_ROUTER)).fatal:
        _put(capabilities, mindspeed.CAPABILITY, found, trial, modules)
        trial, modules = alone, (_ROUTER,)
    _put(capabilities, _MEGATRON, found, trial, modules)
    for other in _NEED_MEGATRON:
        if not capabilities[_MEGATRON].there and other in capabilities and capabilities[other].there:
            capabilities[other] = Capability(other, "missing", f"{_MEGATRON} is broken")


def _put(
    capabilities: dict[str, Capability], name: str, found: Report, trial: Trial, modules: Iterable[str]
) -> None:
    """What an import shows of a capability."""
    capability = capabilities[name]
    if not trial.fatal:
        but = f", but NPU_REPLAY_STRICT=0 goes on though {trial.refusal}" if trial.refusal else ""
        capabilities[name] = replace(capability, why=f"{capability.why}; imports{but}")
        return
    product = _product(found, _PRODUCTS[name])
    why = [f"doesn't import: {trial.problem}"] if trial.problem else []
    why += [f"can't be replayed: {trial.refusal}"] if trial.refusal else []
    says = f"{product.name} {product.version}".rstrip()  # MindSpeed's source has none
    remedy = "take a release that npu_replay knows (docs/versions.md); NPU_REPLAY_STRICT=0 goes on without"
    if trial.problem:
        remedy = f"python -c 'import {', '.join(modules)}' has to work with what is in {product.where}"
    capabilities[name] = replace(capability, state="broken", why=f"{says} {'; '.join(why)}", remedy=remedy)


def _import(modules: Iterable[str]) -> Trial:
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
    return Trial(problem, refusal)


def _faults(capabilities: dict[str, Capability]) -> Iterator[Fault]:
    """Yield what makes replay fail or can't be trusted; what else is missing only loses what needs it."""
    for one in capabilities.values():
        lost = one.name == "recompute" and not one.there
        if lost or (one.name in _PRODUCTS and one.state == "broken"):
            yield Fault(one.why, one.remedy)
        elif one.name.lower() in ("cpu", *_ACCELERATORS) and one.state == "broken":
            yield Fault(f"{one.name}: {one.why}", one.remedy)
    frameworks = [capabilities[name] for name in (_MEGATRON, _TRANSFORMERS)]
    if not any(one.there for one in frameworks):
        remedy = "; or ".join(one.remedy for one in frameworks)
        yield Fault("no framework whose routers are recognised", remedy)


def _product(found: Report, name: str) -> Product:
    return next(product for product in found.products if product.name == name)


# What people see


def run(*, imports: bool, json: bool, out: Path | None, force: bool) -> None:
    """Run the command; exits 0 if replay works here, else 1."""
    options.check_out(out, force=force)
    diagnosis = diagnose(imports=imports)
    if json:
        print_json(diagnosis.to_json())
    else:
        show(parts(diagnosis))
    options.write_out(out, diagnosis.to_json().encode(), force=force)
    raise SystemExit(0 if diagnosis.works else 1)


def parts(diagnosis: Diagnosis) -> Iterator[Part]:
    """Yield the report, what to do about what is missing, and the verdict: tables and lines."""
    yield from diagnosis.report.parts()
    told = {"", *(fault.remedy for fault in diagnosis.faults)}
    capabilities = diagnosis.report.capabilities
    if remedies := [(one.name, (one.remedy, "cyan")) for one in capabilities if one.remedy not in told]:
        yield ""
        yield Table(("If you need it", "Do this"), remedies)
    yield ""
    if diagnosis.works:
        yield f"Replay works here: {_where_it_works(diagnosis)}.", "bold green"
    else:
        yield "Replay does not work here:", "bold red"
        for fault in diagnosis.faults:
            yield f"- {fault.problem}"
            yield f"  {fault.remedy}", "cyan"


def _where_it_works(diagnosis: Diagnosis) -> str:
    states = {capability.name: capability.there for capability in diagnosis.report.capabilities}
    devices = [trial.device.upper() for trial in diagnosis.trials]
    frameworks = [name.removeprefix("replay ") for name in (_MEGATRON, _TRANSFORMERS) if states[name]]
    return (
        f"{' and '.join(frameworks)}; tried with a small router, with recompute, on {' and '.join(devices)}"
    )


if __name__ == "__main__":
    wanted, sys.argv = sys.argv[1:], sys.argv[:1]  # MindSpeed takes what it finds there for its own
    sys.stdout.write("\n" + json.dumps(asdict(_import(wanted))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at once: what a product prints, or how it crashes, at exit is no matter of its import
