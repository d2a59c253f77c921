"""doctor: does routing replay work on this machine, seen and not guessed, and what to do where it doesn't."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from npu_replay.compat import torch_npu
from npu_replay.compat.mindspeed import features as mindspeed
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability, Product
from npu_replay.devices import ACCELERATORS
from npu_replay.doctor import self_test
from npu_replay.doctor.report import Report, report
from npu_replay.doctor.self_test import Outcome
from npu_replay.doctor.trial_import import Trial
from npu_replay.tables import Cell, Table, plain, styled

if TYPE_CHECKING:
    from rich.console import RenderableType

# Replay can't be trusted while one of these is broken; the others only lose what needs them.
_VITAL = ("numpy", "megatron-core", "mindspeed", "torch_npu", "transformers")
_MEGATRON = ("replay on Megatron-core", "megatron.core.transformer.moe.router")
_TRANSFORMERS = ("replay on transformers", "transformers.models.qwen3_moe.modeling_qwen3_moe")
_FRAMEWORKS = {"megatron-core": _MEGATRON, "transformers": _TRANSFORMERS}
_NEED_MEGATRON = ("Megatron's own replay", "Megatron-core on the CPU", "demo")
_ADAPTOR = "mindspeed.megatron_adaptor"  # before Megatron, which it changes as it is imported
_ACCELERATORS = {device.NAME: device for device in ACCELERATORS}
_PATIENCE = 120  # seconds; a first NPU kernel is compiled for tens of them


@dataclass(frozen=True)
class Fault:
    """Why replay can't work here, and what to do about it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found: the report, with what was tried instead of what was only looked up."""

    report: Report
    capabilities: tuple[Capability, ...]
    trials: tuple[Outcome, ...]
    faults: tuple[Fault, ...]

    @property
    def works(self) -> bool:
        return not self.faults

    def to_json(self) -> str:
        """All of it, for programs."""
        found = asdict(self.report)
        found["capabilities"] = [asdict(capability) for capability in self.capabilities]
        found["self_test"] = [asdict(trial) for trial in self.trials]
        found["faults"] = [asdict(fault) for fault in self.faults]
        return json.dumps({"works": self.works, **found}, indent=2)


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
    looked_up = {capability.name: _tried(capability, trials) for capability in found.capabilities}
    _import_megatron(looked_up, found)
    if imports:
        _import_transformers(looked_up, found)
    capabilities = tuple(looked_up.values())
    return Diagnosis(found, capabilities, tuple(trials.values()), tuple(_faults(found, capabilities, trials)))


def _try_device(device: str) -> Outcome:
    """The self-test in a process of its own: a driver may hang or kill it, and torch_npu may not import."""
    last, problem = _child(
        [sys.executable, "-m", "npu_replay.doctor.self_test", device, _ACCELERATORS[device].MODULE]
    )
    if problem:
        return Outcome(device, problem, 0.0)
    try:
        return Outcome(**json.loads(last))
    except (ValueError, TypeError):
        return Outcome(device, f"the self-test printed {last!r}", 0.0)


def _child(command: list[str]) -> tuple[str, str]:
    """The last line that a command printed, and why it failed (empty if it didn't)."""
    # Loaded on purpose, and not by `import torch`, which would hide the reason of a failure.
    environment = os.environ | {torch_npu.AUTOLOAD: "0"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
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
    trial = trials.get(capability.name.lower())
    if trial is None:
        return capability
    if trial.problem:
        return replace(capability, state="broken", why=trial.problem, remedy=_device_remedy(trial.device))
    return replace(
        capability,
        state="works",
        why=f"tried: recorded, replayed, recomputed in {trial.seconds:.2f} s",
        remedy="",
    )


def _device_remedy(kind: str) -> str:
    if kind in _ACCELERATORS:
        remedy: str = _ACCELERATORS[kind].remedy()
        return remedy
    return "this is a fault of npu_replay or of this torch: please report it, with npu-replay doctor --json"


def _import_megatron(capabilities: dict[str, Capability], found: Report) -> None:
    """Put what comes of importing Megatron-core into `capabilities`: with MindSpeed, as jobs there do."""
    (name, router), under = _MEGATRON, capabilities[mindspeed.CAPABILITY]
    if not capabilities[name].there:
        return
    modules = (_ADAPTOR, router) if under.there else (router,)
    trial = _try_import(*modules)
    if _is_fatal(trial) and under.there and not _is_fatal(alone := _try_import(router)):
        capabilities[under.name] = _judged(under, _named(found, "mindspeed"), trial, modules)
        trial, modules = alone, (router,)
    judged = _judged(capabilities[name], _named(found, "megatron-core"), trial, modules)
    capabilities[name] = judged
    for other in _NEED_MEGATRON:
        if not judged.there and other in capabilities and capabilities[other].there:
            capabilities[other] = Capability(other, "missing", f"{name} is broken")


def _import_transformers(capabilities: dict[str, Capability], found: Report) -> None:
    name, module = _TRANSFORMERS
    if capabilities[name].there:
        product = _named(found, "transformers")
        capabilities[name] = _judged(capabilities[name], product, _try_import(module), (module,))


def _try_import(*modules: str) -> Trial:
    """Import these in a process of its own: they may kill it, and this one has to go on without them."""
    last, problem = _child([sys.executable, "-m", "npu_replay.doctor.trial_import", *modules])
    if problem:
        return Trial(problem)
    try:
        return Trial(**json.loads(last))
    except (ValueError, TypeError):
        return Trial(f"the import printed {last!r}")


def _is_fatal(trial: Trial) -> bool:
    return bool(trial.problem or (trial.refusal and import_hook.strict()))


def _judged(capability: Capability, product: str, trial: Trial, modules: Iterable[str]) -> Capability:
    if not _is_fatal(trial):
        but = f", but NPU_REPLAY_STRICT=0 goes on though {trial.refusal}" if trial.refusal else ""
        return replace(capability, why=f"{capability.why}; imports{but}")
    if trial.problem:
        remedy = f"python -c 'import {', '.join(modules)}' has to work"
    else:
        remedy = "take a release that npu_replay knows (docs/matrix.md); NPU_REPLAY_STRICT=0 goes on without"
    return replace(capability, state="broken", why=f"{product} {trial.went_wrong}", remedy=remedy)


def _faults(found: Report, capabilities: tuple[Capability, ...], trials: dict[str, Outcome]) -> list[Fault]:
    by_name = {capability.name: capability for capability in capabilities}
    faults = [
        Fault(f"{product.name} is broken: {product.problem}", _reinstall(product))
        for product in found.products
        if product.problem and product.name in _VITAL
    ]
    under_mindspeed = by_name[mindspeed.CAPABILITY]
    if under_mindspeed.state == "broken" and _product(found, "mindspeed").usable:
        faults.append(Fault(under_mindspeed.why, under_mindspeed.remedy))
    recompute = by_name["recompute"]
    if not recompute.there:
        faults.append(Fault(recompute.why, recompute.remedy))
    faults += [
        Fault(f"{trial.device.upper()}: {trial.problem}", by_name[trial.device.upper()].remedy)
        for trial in trials.values()
        if trial.problem
    ]
    frameworks = [by_name[name] for name, _ in _FRAMEWORKS.values()]
    for framework, (product, _) in zip(frameworks, _FRAMEWORKS.items(), strict=True):
        if not framework.there and _product(found, product).usable:
            faults.append(Fault(framework.why, framework.remedy))  # it was imported, and failed
    if not any(framework.there for framework in frameworks):
        faults.append(
            Fault(
                "no framework whose routers are recognised",
                "; or ".join(framework.remedy for framework in frameworks),
            )
        )
    return faults


def _reinstall(product: Product) -> str:
    if product.name == "megatron-core":
        return "copy megatron/ anew, whole, or take it off PYTHONPATH"
    return f"install {product.name} again"


def _product(found: Report, name: str) -> Product:
    return next(product for product in found.products if product.name == name)


def _named(found: Report, name: str) -> str:
    return f"{name} {_product(found, name).version}".rstrip()  # MindSpeed's source has none


# What people see

_STYLES = {"native": "green", "works": "green", "shimmed": "yellow", "missing": "dim", "broken": "bold red"}


def render(diagnosis: Diagnosis) -> RenderableType:
    """Tables for a terminal: what is installed, what works, what to do about the rest, and the verdict."""
    from rich.console import Group

    return Group(*map(styled, _parts(diagnosis)))


def as_text(diagnosis: Diagnosis) -> str:
    """The same as text alone, where rich isn't installed."""
    return "\n".join(map(plain, _parts(diagnosis)))


def run_command_line(arguments: Sequence[str]) -> None:
    """The command where typer isn't installed; exits as it does."""
    about = "Say whether replay works here, and what to do if it doesn't (then exits 1)."
    parser = argparse.ArgumentParser(prog="npu-replay doctor", description=about)
    parser.add_argument("--json", action="store_true", help="Print JSON for a program.")
    parser.add_argument("--imports", action="store_true", help="Also import transformers (some seconds).")
    options = parser.parse_args(arguments)
    diagnosis = diagnose(imports=options.imports)
    sys.stdout.write(f"{diagnosis.to_json() if options.json else as_text(diagnosis)}\n")
    raise SystemExit(0 if diagnosis.works else 1)


def _parts(diagnosis: Diagnosis) -> Iterator[Table | Cell]:
    """All that is shown, from top to bottom: tables and lines."""
    found = diagnosis.report
    yield Table(("Installed", "Version", "Where"), list(_installed(found)))
    absent = [product.name for product in found.products if not product.found and not product.problem]
    if absent:
        yield f"Not installed: {', '.join(absent)}", "dim"
    yield ""
    states = [(c.name, (c.state, _STYLES[c.state]), c.why) for c in diagnosis.capabilities]
    yield Table(("What", "State", "Why"), states)
    if found.patches:
        yield ""
        patches = [(patch.where, patch.why, patch.reason) for patch in found.patches]
        yield Table(("Changed by npu_replay", "Why", "For"), patches)
    told = {"", *(fault.remedy for fault in diagnosis.faults)}
    remedies = [(c.name, (c.remedy, "cyan")) for c in diagnosis.capabilities if c.remedy not in told]
    if remedies:
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


def _installed(found: Report) -> Iterable[Sequence[Cell]]:
    yield "npu_replay", found.version, _place(Path(__file__).parent)
    yield "torch", found.torch.version, _place(Path(torch.__file__).parent)
    for product in found.products:
        if product.problem:
            yield product.name, product.version or "?", (product.problem, "bold red")
        elif product.found:
            yield product.name, product.version or "?", _place(Path(product.where))


def _place(folder: Path) -> str:
    """Where a product lies; the environment's own folder needs no long path."""
    installed = any(folder.is_relative_to(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return "site-packages" if installed else str(folder)


def _where_it_works(diagnosis: Diagnosis) -> str:
    states = {capability.name: capability.there for capability in diagnosis.capabilities}
    devices = [trial.device.upper() for trial in diagnosis.trials]
    frameworks = [name.removeprefix("replay ") for name, _ in _FRAMEWORKS.values() if states[name]]
    return (
        f"{' and '.join(frameworks)}; tried with a small router, with recompute, on {' and '.join(devices)}"
    )
