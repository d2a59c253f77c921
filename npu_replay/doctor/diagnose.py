"""doctor: does routing replay work on this machine, seen and not guessed, and what to do where it doesn't.

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
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from npu_replay import environment, options
from npu_replay.compat import torch_npu
from npu_replay.compat.mindspeed import features as mindspeed
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability, Product
from npu_replay.devices import ACCELERATORS
from npu_replay.doctor import self_test
from npu_replay.doctor.report import Report, report
from npu_replay.doctor.self_test import Outcome
from npu_replay.errors import ReplayError
from npu_replay.tables import Cell, Part, Table, print_json, show

_Answer = TypeVar("_Answer")

# Replay can't be trusted while one of these is broken; the others only lose what needs them.
_VITAL = ("numpy", "megatron-core", "mindspeed", "torch_npu", "transformers")
_MEGATRON, _TRANSFORMERS = "replay on Megatron-core", "replay on transformers"
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
        found = asdict(self)
        about = found.pop("report") | {"self_test": found.pop("trials")}
        return json.dumps({"works": self.works} | about | found, indent=2)


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
    faults = tuple(_faults(found, capabilities, trials))
    return Diagnosis(found, tuple(capabilities.values()), tuple(trials.values()), faults)


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
    """What a module of ours answers in a process of its own, or why it doesn't."""
    last, problem = _child([sys.executable, "-m", module, *arguments])
    try:
        return problem or kind(**json.loads(last))
    except (ValueError, TypeError):
        return f"the process printed {last!r}"


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
        remedy = f"python -c 'import {', '.join(modules)}' has to work"
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


def _faults(
    found: Report, capabilities: dict[str, Capability], trials: dict[str, Outcome]
) -> Iterator[Fault]:
    for product in found.products:
        if product.problem and product.name in _VITAL:
            remedy = f"install {product.name} again"
            if product.name == "megatron-core":
                remedy = "copy megatron/ anew, whole, or take it off PYTHONPATH"
            yield Fault(f"{product.name} is broken: {product.problem}", remedy)
    recompute = capabilities["recompute"]
    if not recompute.there:
        yield Fault(recompute.why, recompute.remedy)
    for trial in trials.values():
        if trial.problem:
            device = trial.device.upper()
            yield Fault(f"{device}: {trial.problem}", capabilities[device].remedy)
    for name, product_name in _PRODUCTS.items():
        one = capabilities[name]
        if one.state == "broken" and _product(found, product_name).usable:  # it was looked into, and fails
            yield Fault(one.why, one.remedy)
    frameworks = [capabilities[name] for name in (_MEGATRON, _TRANSFORMERS)]
    if not any(one.there for one in frameworks):
        remedy = "; or ".join(one.remedy for one in frameworks)
        yield Fault("no framework whose routers are recognised", remedy)


def _product(found: Report, name: str) -> Product:
    return next(product for product in found.products if product.name == name)


# What people see

_STYLES = {"native": "green", "works": "green", "shimmed": "yellow", "missing": "dim", "broken": "bold red"}


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
    """What is installed, what works, what to do about the rest, and the verdict: tables and lines."""
    found = diagnosis.report
    yield Table(("Installed", "Version", "Where"), list(_installed(found)))
    if found.absent:
        yield f"Not installed: {found.absent}", "dim"
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
    yield "npu_replay", found.version, _place(Path(__file__).parents[1])
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
    frameworks = [name.removeprefix("replay ") for name in (_MEGATRON, _TRANSFORMERS) if states[name]]
    return (
        f"{' and '.join(frameworks)}; tried with a small router, with recompute, on {' and '.join(devices)}"
    )


if __name__ == "__main__":
    wanted, sys.argv = sys.argv[1:], sys.argv[:1]  # MindSpeed takes what it finds there for its own
    sys.stdout.write("\n" + json.dumps(asdict(_import(wanted))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at once: what a product prints, or how it crashes, at exit is no matter of its import
