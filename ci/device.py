"""What ci/device.sh runs: parts in processes of their own, and one JSON of what they found.

Only Python's own library is imported here: torch comes in the parts, so that none can take the others along.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 570.0
OF_A_ROLLOUT = 900.0
"""Seconds for all parts together, and for each start of an engine."""
PASS = "PASS"
FAIL = "FAIL"
MISSING = "MISSING"
NOT_HERE = 2
PLUGINS = "vllm.general_plugins"

_LOOK = """
import importlib.metadata, json, sys, torch
from npu_replay import devices
from npu_replay.smoke.report import machine, versions
kind = devices.available()[0] if sys.argv[1] == "auto" else devices.pick(sys.argv[1]).type
known = versions()
for name in ("transformers", "pytest"):
    try:
        known[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        known[name] = ""
found = {"machine": machine(torch.device(kind)), "versions": known}
count = 1 if kind == "cpu" else getattr(torch, kind).device_count()
print("\\n" + json.dumps(found | {"count": count}))
"""
_DOCTOR = """
import json, sys
from dataclasses import asdict
from npu_replay.doctor.diagnose import diagnose
found = diagnose(imports=True)
told = {"trials": found.trials, "faults": [asdict(one) for one in found.faults]}
json.dump(told, open(sys.argv[1], "w"))
for fault in found.faults:
    print(fault.name, fault.why, sep=': ')
sys.exit(not found.works)
"""
_BENCH = """
import json, sys
from dataclasses import asdict
from npu_replay import devices
from benchmarks import cases, run
if sys.argv[3] == "quick":
    cases.TOKENS, cases.ROUTER, pairs = (64,), cases.ROUTER | {"hidden_size": 64}, 1
else:
    pairs = 20
device = devices.pick(sys.argv[2])
about, rows = run.measured(device, list(cases.parts(device, pairs, quick=False)), print)
json.dump({"about": about, "rows": [asdict(row) for row in rows]}, open(sys.argv[1], "w"))
"""
CAPTURED = "[npu_replay] routes of "
"""How the line begins with which a worker says that it captures, and what it checked."""


@dataclass(frozen=True)
class Part:
    """One thing to try.

    Attributes:
        name: in the JSON.
        needs: modules that it can't be without.
        seconds: its time limit.
        command: after the interpreter; {out} is a file for what it found.
    """

    name: str
    needs: tuple[str, ...]
    seconds: float
    command: tuple[str, ...]


@dataclass
class Result:
    """How a part went.

    Attributes:
        result: PASS, FAIL, or MISSING where it couldn't be tried.
        why: the last lines of a failure, or what is missing.
        rc: its exit code; None if it wasn't started, or was stopped.
        passed, skipped: of a part's tests; each skipped one with its reason.
        found: what it wrote.
    """

    part: str
    result: str
    why: str = ""
    rc: int | None = None
    seconds: float = 0.0
    passed: int = 0
    skipped: list[str] = field(default_factory=list)
    found: Any = None


def parts(kind: str, count: int, *, quick: bool) -> list[Part]:
    """What is tried on so many devices of a kind."""
    # Options of the project's own that need plug-ins are left out: pytest alone is enough.
    alone = ("-p", "no:cacheprovider", "-o", "addopts=--strict-markers --import-mode=importlib")
    config = ("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "--junitxml", "{out}")
    pytest = ("-m", "pytest", "-q", "-m", "accelerator", *alone, *config)
    tests = [
        Part(file, ("pytest", *needs), seconds, (*pytest, str(ROOT / "tests" / "device" / file)))
        for file, needs, seconds in (
            ("test_core.py", (), 240),
            ("test_spread.py", (), 60),
            ("test_transformers.py", ("transformers",), 120),
            ("test_sharded.py", ("transformers",), 90),
            ("test_megatron.py", ("megatron.core", "einops"), 150),
        )
    ]
    splits = {8: "--tp 2 --pp 2 --ep 4", 4: "--tp 2 --pp 2 --ep 2", 2: "--tp 2 --ep 2", 1: ""}
    split = next(sizes for ranks, sizes in splits.items() if count % ranks == 0)
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {count}" if count > 1 else ""
    smoke = f"{torchrun} -m npu_replay smoke {split} --recompute --device {kind} --out {{out}} --force"
    how = "quick" if quick else "full"
    return [
        *(tests[:1] if quick else tests),
        Part("doctor", (), 120, ("-c", _DOCTOR, "{out}")),
        Part("smoke", ("megatron.core",), 150, tuple(smoke.split())),
        Part("bench", ("megatron.core",), 180, ("-c", _BENCH, "{out}", kind, how)),
    ]


def rollouts(models: Sequence[Path], tensor_parallel_size: int) -> list[Part]:
    """Three starts of each model: eager, with graphs and held against the first, and without routes."""
    script = str(ROOT / "ci" / "rollout_device.py")
    tp = str(tensor_parallel_size)
    starts = []
    for model in models:
        against = ("--against", f"{{folder}}/rollout {model.name} eager.out")
        for mode, more in (("eager", ()), ("graph", against), ("off", ())):
            command = (script, str(model), "{out}", "--mode", mode, "--tp", tp, *more)
            starts.append(Part(f"rollout {model.name} {mode}", ("vllm",), OF_A_ROLLOUT, command))
    return starts


class Bench:
    """Runs parts in an environment, until the time for all of them is over."""

    def __init__(self, environment: dict[str, str], folder: Path, logs: Path, budget: float = BUDGET) -> None:
        self._environment = environment
        self._folder = folder
        self._logs = logs
        self._end = time.monotonic() + budget
        self._budget = budget

    def run(self, part: Part) -> Result:
        """A part to its end, or to its time limit."""
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        missing = [name for name in part.needs if self.call(["-c", look, name], 60, "needs")[0]]
        if missing:
            why = f"{', '.join(missing)} can't be imported; --wheels FOLDER may have it"
            return Result(part.name, MISSING, why)
        out = self._folder / f"{part.name}.out"
        seconds = min(part.seconds, self._end - time.monotonic())
        if seconds <= 0:
            return Result(part.name, FAIL, f"no time left of {self._budget:g} s for all parts")
        started = time.monotonic()
        places = {"{out}": str(out), "{folder}": str(self._folder)}
        words = [re.sub(r"\{(out|folder)\}", lambda match: places[match[0]], word) for word in part.command]
        rc, output = self.call(words, seconds, part.name)
        spent = round(time.monotonic() - started, 1)
        result = Result(part.name, PASS if rc == 0 else FAIL, rc=rc, seconds=spent)
        if rc is None:
            result.why = f"stopped after {seconds:.0f} s"
        elif rc:
            result.why = "; ".join(_plain(output)[-3:])
        if out.exists():
            _read(result, out, output)
        return result

    def call(self, arguments: Sequence[str], seconds: float, name: str) -> tuple[int | None, str]:
        """Exit code (none: it was stopped) and output of an interpreter with these arguments."""
        log = self._logs / f"{name}.log"
        with log.open("w+b") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                rc: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                rc = None
            with contextlib.suppress(ProcessLookupError):  # what it started and left goes too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return rc, log.read_text(encoding="utf-8", errors="replace")


def _plain(output: str) -> list[str]:
    """Without empty lines, and without this machine's paths."""
    lines = output.replace(str(ROOT), ".").replace(str(Path.home()), "~").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _read(result: Result, out: Path, output: str) -> None:
    """What a part left: a test report, or JSON."""
    if not result.part.endswith(".py"):
        with contextlib.suppress(ValueError):  # it was stopped while it wrote
            result.found = json.loads(out.read_text(encoding="utf-8"))
        report = result.found if isinstance(result.found, dict) else {}
        # On vllm-ascend a start that npu_replay captures says so in a worker. Without that line the rows that
        # were counted are the release's own.
        if report.get("vllm_ascend") and report.get("mode") != "off":
            line = next((line for line in output.splitlines() if CAPTURED in line), "")
            report["captured"] = line[line.find(CAPTURED) :] if line else ""
            if result.result == PASS and not line:
                result.result = FAIL
                result.why = f"no worker said «{CAPTURED} ...»"
        return
    failed = []
    for case in ElementTree.parse(out).getroot().iter("testcase"):
        name = str(case.get("name"))
        skip = case.find("skipped")
        if skip is not None:
            result.skipped.append(f"{name}: {skip.get('message')}")
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        else:
            result.passed += 1
    if failed:
        result.why = f"{len(failed)} failed: {', '.join(failed[:8])}; {result.why}"
    elif result.result == PASS and not result.passed:
        why = f"all were skipped: {result.skipped[0] if result.skipped else '-'}"
        result.result = MISSING
        result.why = why


@contextlib.contextmanager
def environment(wheels: Path | None, device: str) -> Iterator[tuple[dict[str, str], Path]]:
    """Environment variables with this clone and what the wheels hold on PYTHONPATH, and a folder for them."""
    with tempfile.TemporaryDirectory(prefix="npu_replay-device-") as name:
        folder = Path(name)
        paths = [folder, ROOT, *_unpacked(wheels, folder / "wheels"), ROOT / "tests"]
        variables = dict(os.environ)
        if device == "simulated":
            paths.append(ROOT / "tests" / "device" / "stand_in")
            variables |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            variables |= {"NPU_REPLAY_TEST_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        before = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, paths), before]))
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
        # vLLM looks for npu_replay's plug-in in installed distributions.
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        line = project.partition(f'[project.entry-points."{PLUGINS}"]\n')[2].partition("\n")[0]
        about = folder / "npu_replay-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-replay\nVersion: 0\n")
        (about / "entry_points.txt").write_text(f"[{PLUGINS}]\n{line.replace(chr(34), '')}\n")
        yield variables, folder


def _unpacked(wheels: Path | None, folder: Path) -> list[Path]:
    """The wheels whose packages the environment lacks, unpacked; and their folder, for what is so already."""
    if wheels is None:
        return []
    folders = [wheels.resolve()]
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.partition("-")[0].replace("_", "-")
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            place = folder / name
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(place)
            folders += [place, *place.glob("*.data/p*lib")]
    return folders


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="ci/device.sh", description="All that needs an accelerator, here.")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what the environment lacks")
    parser.add_argument("--out", type=Path, metavar="FILE", default=ROOT / "out" / "device.json")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "npu", "simulated"), default="auto")
    parser.add_argument("--quick", action="store_true", help="some of it, to try this script")
    words = "instead of all else: start vLLM with these models, folders of Hugging Face's form"
    parser.add_argument("--rollout", type=Path, nargs="+", metavar="MODEL", default=[], help=words)
    words = "tensor-parallel ranks of these, with their experts spread"
    parser.add_argument("--tp", type=int, default=1, help=words)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Try all parts and write the JSON; 1 if one failed, 2 if there is no such device."""
    args = options(arguments)
    out: Path = args.out.resolve()
    logs = out.with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with environment(args.wheels, args.device) as (variables, folder):
        models = [model.resolve() for model in args.rollout]
        bench = Bench(variables, folder, logs, 3 * OF_A_ROLLOUT * len(models) or BUDGET)
        wanted = "npu" if args.device == "simulated" else args.device
        rc, output = bench.call(["-c", _LOOK, wanted], 120, "device")
        if rc:
            print(f"ci/device.sh: the device can't be used: {'; '.join(_plain(output)[-2:])}")
            return NOT_HERE
        seen = json.loads(output.splitlines()[-1])
        kind = seen["machine"]["device"]
        name = seen["machine"]["name"]
        if kind == "cpu" and args.device != "cpu":
            tries = "(--device cpu or simulated tries the script)"
            print(f"ci/device.sh: torch finds no accelerator here {tries}")
            return NOT_HERE
        print(f"{seen['count']} x {name or 'CPU'}, torch {seen['versions']['torch']}", flush=True)
        results = []
        for part in rollouts(models, args.tp) or parts(kind, seen["count"], quick=args.quick):
            last = bench.run(part)
            results.append(last)
            about = f"{last.passed} passed, {len(last.skipped)} skipped" if last.passed else ""
            print(f"{last.result:7}  {last.part:20} {last.seconds:6.1f} s  {last.why or about}", flush=True)
    report = {
        "schema": 1,
        "kind": "npu_replay device",
        "passed": all(result.result != FAIL for result in results)
        and any(result.result == PASS for result in results),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": args.quick,
        "devices": seen["count"],
        "versions": seen["versions"],
        "machine": seen["machine"],
        "parts": [asdict(result) for result in results],
    }
    out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"Wrote {out}; what each part printed is in {logs}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
