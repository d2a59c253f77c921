"""The report of a smoke run: lines for people, and one JSON to attach and to keep.

It names versions, sizes and results; no host, no user and no path.
"""

from __future__ import annotations

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
_PRODUCTS = ("megatron-core", "mindspeed", "torch_npu", "numpy")
_CHECKOUTS = ("megatron-core", "mindspeed")
_WIDTH = 13


@dataclass(frozen=True)
class Result:
    """How one feature went with one way of routing.

    Attributes:
        feature: its name.
        case: the way of routing; empty where it makes no difference.
        result: PASS, FAIL or SKIP.
        why: one line: what was seen, what is wrong, or why it was not tried.
        rank: the lowest rank that failed; None if none did.
        seconds: on rank 0.
        trace: where the exception came from, if one was raised.
    """

    feature: str
    case: str
    result: str
    why: str
    rank: int | None = None
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All that a run has found so far, on one rank.

    >>> report = Report(Options(), 1, results=[Result("bytes", "softmax", FAIL, "others came back", rank=3)])
    >>> report.lines("bytes")
    'FAIL  bytes         softmax: rank 3: others came back'
    """

    options: Options
    processes: int
    device: torch.device | None = None
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> bool:
        """Nothing failed, and something passed."""
        results = {one.result for one in self.results}
        return PASS in results and FAIL not in results

    def to_json(self) -> str:
        """All of it, for programs. docs/dev/smoke.md says what each field is."""
        spent: dict[str, float] = {}
        for one in self.results:
            spent[one.feature] = round(spent.get(one.feature, 0.0) + one.seconds, 3)
        return json.dumps(
            {
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
                "sizes": {
                    "layers": self.options.layers,
                    "experts": self.options.experts,
                    "topk": TOPK,
                    "micro_batches": self.options.micro_batches,
                },
                "results": [asdict(one) for one in self.results],
                "seconds": spent | {"all": round(time.perf_counter() - self.started, 3)},
            },
            indent=1,
        )

    def heading(self) -> str:
        """Say what is run on what."""
        axes = ("tp", "cp", "pp", "vp", "ep", "etp")
        sizes = [f"{axis} {size}" for axis in axes if (size := getattr(self.options, axis)) > 1]
        known, about = versions(), machine(self.device)
        names = [f"{name} {version}" for name, version in known.items() if version and name != "numpy"]
        where = about["name"] or about["device"] or "no device"
        where += f", CANN {about['cann']}" if about["cann"] else ""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        model = ["HybridModel"] if self.options.model == "hybrid" else []
        what = ", ".join([*model, processes, *sizes])
        return wrapped(f"npu-replay smoke: {what}, on {where}\n{', '.join(names)}", width())

    def lines(self, feature: str) -> str:
        """The line of a feature; for a failure one for each way of routing that fails."""
        mine = [one for one in self.results if one.feature == feature]
        failed = [one for one in mine if one.result == FAIL]
        if failed:
            told = []
            for one in failed:
                rank = f"rank {one.rank}" if one.rank is not None else ""
                why = ": ".join(filter(None, (one.case, rank, " ".join(one.why.split()))))
                told.append(_line(one.result, feature, why))
            return "\n".join(told)
        tried = [one for one in mine if one.result == PASS]
        if not tried:
            return _line(SKIP, feature, mine[0].why)
        skipped = [f"{one.case} not tried: {one.why}" for one in mine if one.result == SKIP]
        cases = f"{', '.join(one.case for one in tried)}: " if skipped else ""
        return _line(PASS, feature, "; ".join([cases + tried[0].why, *skipped]))

    def verdict(self) -> str:
        """The last line."""
        spent = time.perf_counter() - self.started
        named = {
            result: list(dict.fromkeys(one.feature for one in self.results if one.result == result))
            for result in (PASS, FAIL)
        }
        if not self.passed:
            return f"FAIL: {', '.join(named[FAIL]) or 'nothing was tried'}, after {spent:.0f} s"
        return f"PASS: {len(named[PASS])} of {len(named[PASS])} features, in {spent:.0f} s"


def _line(result: str, feature: str, why: str) -> str:
    return wrapped(f"{result}  {feature:<{_WIDTH}} {why}", width(), " " * (_WIDTH + 7))


# What is here


def versions() -> dict[str, str]:
    """The release of each product, empty where it isn't here, «?» where it doesn't say; with the commit of a
    checkout."""
    from npu_replay import __version__  # here: the package's face

    found = {product.name: product for product in probe.products()}
    known = {"npu_replay": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in _PRODUCTS:
        product = found[name]
        version = product.version or "?" if product.found else ""
        commit = _commit(Path(product.where)) if product.found and name in _CHECKOUTS else ""
        known[name] = f"{version} ({commit})" if commit else version
    return known


def _commit(folder: Path) -> str:
    """The first digits of the commit that a checkout is at; empty elsewhere."""
    for place in (folder, *folder.parents)[:3]:
        head = place / ".git" / "HEAD"
        try:
            said = head.read_text(encoding="utf-8").strip()
            if said.startswith("ref: "):
                said = (place / ".git" / said[5:]).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return said[:8] if re.fullmatch(r"[0-9a-f]{40}", said) else ""
    return ""


def machine(device: torch.device | None) -> dict[str, str]:
    """The kind of device, its name as its driver says, CANN's release, and the processor."""
    kind = "" if device is None else device.type
    return {
        "device": kind,
        "name": "" if device is None else name_of(device),
        "cann": _cann() if kind == "npu" else "",
        "cuda": (torch.version.cuda or "") if kind == "cuda" else "",
        "processor": platform.machine(),
        "system": platform.system(),
    }


def _cann() -> str:
    """CANN's release, read from where its set_env.sh points to."""
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        home = os.environ.get(variable)
        for file in sorted(Path(home).glob("**/ascend_toolkit_install.info")) if home else []:
            found = re.search(r"^version=(\S+)", file.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found[1]
    return ""
