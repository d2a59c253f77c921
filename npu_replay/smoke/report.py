"""Report a smoke run in lines for people, and in one JSON document to attach and keep.

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

PASS = "PASS"
FAIL = "FAIL"
_WIDTH = 13  # of a feature's name


@dataclass(frozen=True)
class Result:
    """Describes the result of one feature with one way of routing.

    Attributes:
        case: the way of routing; empty where it makes no difference.
        why: one line: what was seen, or what is wrong.
        rank: the rank that failed; None if none did.
        trace: where an exception came from.
    """

    feature: str
    case: str
    result: str
    why: str
    rank: int | None = None
    trace: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Collects the results of a run on one rank.

    >>> Report(Options(), 1).line(Result("replay", "softmax", FAIL, "it broke", rank=3))
    'FAIL  replay        softmax: rank 3: it broke'
    """

    options: Options
    processes: int
    device: torch.device | None = None
    results: list[Result] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> bool:
        return {result.result for result in self.results} == {PASS}

    def to_json(self) -> str:
        sizes = ("layers", "experts", "micro_batches")
        about = {
            "schema": 1,
            "kind": "npu_replay smoke",
            "passed": self.passed,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "options": {name: getattr(self.options, name) for name in (*SIZES, "recompute", "device")},
            "processes": self.processes,
            "versions": versions(),
            "machine": machine(self.device),
            "sizes": {name: getattr(self.options, name) for name in sizes} | {"topk": TOPK},
            "results": [*map(asdict, self.results)],
            "seconds": {"all": round(time.perf_counter() - self.started, 3)},
        }
        return json.dumps(about, indent=1)

    def heading(self) -> str:
        sizes = [f"{axis} {size}" for axis in SIZES if (size := getattr(self.options, axis)) > 1]
        about = machine(self.device)
        names = [f"{name} {version}" for name, version in versions().items() if version and name != "numpy"]
        where = about["name"] or about["device"] or "no device"
        where += f", CANN {about['cann']}" if about["cann"] else ""
        what = ", ".join([f"{self.processes} process{'es' if self.processes > 1 else ''}", *sizes])
        return wrapped(f"npu-replay smoke: {what}, on {where}\n{', '.join(names)}", width())

    def line(self, result: Result) -> str:
        rank = "" if result.rank is None else f"rank {result.rank}"
        why = ": ".join(filter(None, (result.case, rank, result.why)))
        begins = f"{result.result}  {result.feature:<{_WIDTH}} "
        return wrapped(begins + why, width(), " " * len(begins))

    def verdict(self) -> str:
        verdict = f"PASS: {len(self.results)} trials" if self.passed else f"FAIL: {self.results[-1].feature}"
        return f"{verdict}, in {time.perf_counter() - self.started:.0f} s"


def versions() -> dict[str, str]:
    """Return the releases of products, empty if not installed, «?» if they don't say theirs."""
    from npu_replay import __version__  # here: only this function needs the package itself

    known = {"npu_replay": __version__, "python": platform.python_version(), "torch": torch.__version__}
    products = {product.name: product for product in probe.products()}
    for name in ("megatron-core", "mindspeed", probe.ADAPTOR, probe.TE_NPU, "torch_npu", "numpy"):
        known[name] = products[name].version or "?" if products[name].installed else ""
    return known


def machine(device: torch.device | None) -> dict[str, str]:
    """Return the kind of device, its driver's name for it, CANN's release, and the processor."""
    kind = "" if device is None else device.type
    variables = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if kind == "npu" else ()
    homes = [
        Path(os.environ[name]) for name in variables if os.environ.get(name)
    ]  # CANN's set_env.sh sets them
    files = [file for home in homes for file in sorted(home.glob("**/ascend_toolkit_install.info"))]
    texts = "\n".join(file.read_text(errors="replace") for file in files)
    cann = re.search(r"^version=(\S+)", texts, re.MULTILINE)
    return {
        "device": kind,
        "name": "" if device is None else name_of(device),
        "cann": cann[1] if cann else "",
        "cuda": (torch.version.cuda or "") if kind == "cuda" else "",
        "processor": platform.machine(),
        "system": platform.system(),
    }
