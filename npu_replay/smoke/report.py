"""Report a smoke run in lines for people, and in one JSON document to attach and keep.

It names versions, sizes and results; no host, no user and no path.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from npu_replay.compat import probe
from npu_replay.devices import name_of
from npu_replay.smoke.model import TOPK
from npu_replay.smoke.options import SIZES, Options
from npu_replay.tables import width, wrapped

SCHEMA = 1
KIND = "npu_replay smoke"
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
_WIDTH = 13  # of a feature's name


@dataclass(frozen=True)
class Result:
    """Describes the result of one feature with one way of routing.

    Attributes:
        case: the way of routing; empty where it makes no difference.
        why: one line: what was seen, what is wrong, or why it was not tried.
        rank: the lowest rank that failed; None if none did.
        trace: where the exception came from, if one was raised.
        broken: an exception left the schedule, so other ranks may wait in vain in their collectives.
        at: when it ended, in seconds; a rank that waited in vain ends later.
    """

    feature: str
    case: str
    result: str
    why: str
    rank: int | None = None
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)
    broken: bool = False
    at: float = 0.0


def first_to_fail(results: list[Result], patience: float) -> Result:
    """Return the result of the lowest rank that failed, not by waiting for another; else the first result."""
    failed = [one for one in results if one.result == FAIL]
    first = min((one.at for one in failed), default=0.0)
    return next((one for one in failed if one.at - first < patience / 2), results[0])


@dataclass
class Report:
    """Collects the results of a run on one rank.

    >>> report = Report(Options(), 1, results=[Result("replay", "softmax", FAIL, "it broke", rank=3)])
    >>> report.lines("replay")
    'FAIL  replay        softmax: rank 3: it broke'
    """

    options: Options
    processes: int
    device: torch.device | None = None
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> bool:
        return bool(self._features(PASS)) and not self._features(FAIL)

    def to_json(self) -> str:
        sizes = ("layers", "experts", "micro_batches")
        about = {
            "schema": SCHEMA,
            "kind": KIND,
            "passed": self.passed,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "options": {
                name: getattr(self.options, name) for name in (*SIZES, "model", "recompute", "device")
            },
            "processes": self.processes,
            "versions": versions(),
            "machine": machine(self.device),
            "sizes": {name: getattr(self.options, name) for name in sizes} | {"topk": TOPK},
            "results": [
                {name: told for name, told in asdict(one).items() if name not in ("broken", "at")}
                for one in self.results
            ],
            "seconds": {"all": round(time.perf_counter() - self.started, 3)},
        }
        return json.dumps(about, indent=1)

    def heading(self) -> str:
        sizes = [f"{axis} {size}" for axis in SIZES if (size := getattr(self.options, axis)) > 1]
        known, about = versions(), machine(self.device)
        names = [f"{name} {version}" for name, version in known.items() if version and name != "numpy"]
        where = about["name"] or about["device"] or "no device"
        where += f", CANN {about['cann']}" if about["cann"] else ""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        what = ", ".join([*["HybridModel"] * (self.options.model == "hybrid"), processes, *sizes])
        return wrapped(f"npu-replay smoke: {what}, on {where}\n{', '.join(names)}", width())

    def lines(self, feature: str) -> str:
        mine, told = [one for one in self.results if one.feature == feature], []
        for one in mine:
            if one.result == FAIL:
                rank = f"rank {one.rank}" if one.rank is not None else ""
                told.append((FAIL, ": ".join(filter(None, (one.case, rank, " ".join(one.why.split()))))))
        if not told:
            tried = [one for one in mine if one.result == PASS]
            skipped = [f"{one.case} not tried: {one.why}" for one in mine if one.result == SKIP and tried]
            cases = f"{', '.join(one.case for one in tried)}: " if skipped else ""
            whole = "; ".join([cases + (tried or mine)[0].why, *skipped])
            told.append((PASS if tried else SKIP, whole))
        indent = " " * (_WIDTH + 7)
        return "\n".join(
            wrapped(f"{result}  {feature:<{_WIDTH}} {why}", width(), indent) for result, why in told
        )

    def verdict(self) -> str:
        spent, count = time.perf_counter() - self.started, len(self._features(PASS))
        if self.passed:
            return f"PASS: {count} of {count} features, in {spent:.0f} s"
        return f"FAIL: {', '.join(self._features(FAIL)) or 'nothing was tried'}, after {spent:.0f} s"

    def _features(self, result: str) -> list[str]:
        return list(dict.fromkeys(one.feature for one in self.results if one.result == result))


def versions() -> dict[str, str]:
    """Return the releases of products, empty if not installed, with the commit of a checkout, or «?»."""
    from npu_replay import __version__  # here: only this function needs the package itself

    known = {"npu_replay": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found = {product.name: product for product in probe.products()}
    for name in ("megatron-core", "mindspeed", probe.ADAPTOR, probe.TE_NPU, "torch_npu", "numpy"):
        product = found[name]
        known[name] = product.version or "?" if product.found else ""
        if product.found and name not in ("torch_npu", "numpy"):
            folders = [*Path(product.where, ".").parents][:3]
            git, said = next((one / ".git" for one in folders if (one / ".git").is_dir()), None), ""
            with contextlib.suppress(OSError):  # a packed ref
                said = Path(git, "HEAD").read_text().strip() if git else ""
                if git and said.startswith("ref: "):
                    said = Path(git, said[5:]).read_text().strip()
            known[name] += f" ({said[:8]})" if re.fullmatch(r"[0-9a-f]{40}", said) else ""
    return known


def machine(device: torch.device | None) -> dict[str, str]:
    """Return the kind of device, its driver's name for it, CANN's release, and the processor."""
    kind, cann = "" if device is None else device.type, ""
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if kind == "npu" else ():
        home = os.environ.get(variable)  # where CANN's set_env.sh points to
        for file in sorted(Path(home).glob("**/ascend_toolkit_install.info")) if home else []:
            release = re.search(r"^version=(\S+)", file.read_text(errors="replace"), re.MULTILINE)
            cann = cann or (release[1] if release else "")
    return {
        "device": kind,
        "name": "" if device is None else name_of(device),
        "cann": cann,
        "cuda": (torch.version.cuda or "") if kind == "cuda" else "",
        "processor": platform.machine(),
        "system": platform.system(),
    }
