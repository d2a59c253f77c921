"""The tables of docs/versions.md, and the ratios in docs/dev/performance.md, from docs/dev/verified/.

    python ci/verified.py            # print the rows
    python ci/verified.py --write    # and put them into the pages
    python ci/verified.py FILE ...   # print the rows of these reports alone

Each report is a JSON file that `npu-replay smoke --out` wrote (docs/dev/notes.md), or that
`bash ci/device.sh` did: a row of its parts, and its bench as ratios.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / "docs" / "dev" / "verified"
COSTS = ROOT / "docs" / "dev" / "performance.md"
MARKS = "<!-- verified -->", "<!-- end of verified -->"
SMOKE = "npu_replay smoke"
DEVICE = "npu_replay device"
DEVICES = {"npu": "NPU", "cuda": "CUDA", "cpu": "CPU"}
_AXES = ("tp", "cp", "pp", "vp", "ep", "etp")
_MACHINE = ("device", "CANN or CUDA", "torch, Python", "Megatron-core")
_SENT = ("npu_replay", "day", "from", "report")
TITLES = {
    SMOKE: (*_MACHINE, "MindSpeed", "processes", "features", *_SENT),
    DEVICE: (*_MACHINE, "transformers", "passed", "failed", "not tried", *_SENT),
}
HEADS = {SMOKE: "Reports of `npu-replay smoke`", DEVICE: "Reports of `bash ci/device.sh`"}


def row(report: dict[str, Any], name: str) -> list[str]:
    """A report as a row of its kind's table."""
    machine = report["machine"]
    versions = report["versions"]
    torch = versions["torch"]
    device = machine["name"] or {"cpu": "a CPU"}.get(machine["device"], machine["device"])
    if report["kind"] == SMOKE:
        options = report["options"]
        sizes = [
            str(report["processes"]),
            *(f"{axis} {options[axis]}" for axis in _AXES if options[axis] > 1),
        ]
        sizes += ["recompute"] * options["recompute"]
        torch += f" ({versions['torch_npu']})" if versions["torch_npu"] else ""
        tried = {entry["feature"] for entry in report["results"]}
        failed = dict.fromkeys(entry["feature"] for entry in report["results"] if entry["result"] == "FAIL")
        features = f"not {', '.join(failed)}" if failed else f"all {len(tried)}"
        of_kind = [versions["mindspeed"], ", ".join(sizes), features]
    else:
        device = f"{report['devices']} x {device}"
        of_kind = [versions["transformers"]]
        for result in ("PASS", "FAIL", "MISSING"):
            those = [part for part in report["parts"] if part["result"] == result]
            of_kind.append(
                ", ".join(
                    f"{part['part']} ({part['passed']})" if part["passed"] else part["part"] for part in those
                )
            )
    sender, known, _ = name.partition("--")
    return [
        f"{device}, {machine['processor']}",
        machine["cann"] or machine["cuda"],
        f"{torch}, {versions['python']}",
        versions["megatron-core"],
        *of_kind,
        versions["npu_replay"],
        report["date"][:10],
        sender if known else "this project",
        f"[{name}](dev/verified/{name}.json)",
    ]


def bench_table(reports: dict[str, dict[str, Any]]) -> str:
    """What the bench of each report of ci/device.sh measured, as ratios to the first way."""
    rows: dict[tuple[str, int, str], dict[str, str]] = {}
    for name, report in reports.items():
        for part in report["parts"]:
            for row in (part["found"] or {}).get("rows", []) if part["part"] == "bench" else []:
                ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
                rows.setdefault((row["what"], row["tokens"], row["way"]), {})[name] = ratio
    names = [name for name in reports if any(name in ratios for ratios in rows.values())]
    lines = [
        [what, f"{tokens:,}" if tokens else "", way, *(ratios.get(name, "") for name in names)]
        for (what, tokens, way), ratios in rows.items()
        # Not the way that the others are held against.
        if any(ratio != "1.00 (1.00-1.00)" for ratio in ratios.values())
    ]
    return pages.table(["", "tokens", "way", *(f"[{name}](verified/{name}.json)" for name in names)], lines)


def table(folder: Path = FOLDER) -> str:
    """The rows of all reports, those on accelerators first: smoke's, then those of ci/device.sh.

    A device without a report has an empty row.

    Raises:
        ValueError: one isn't a report; says which and why.
    """
    tables = []
    for kind, titles in TITLES.items():
        reports = of_kind(kind, folder)
        rows = [row(report, name) for name, report in reports.items()]
        missing = DEVICES.keys() - {report["machine"]["device"] for report in reports.values()}
        empty = [""] * (len(titles) - 1)
        rows += [[f"{name}: no report yet", *empty] for device, name in DEVICES.items() if device in missing]
        tables.append(f"**{HEADS[kind]}**\n\n{pages.table(titles, rows)}")
    return "\n\n".join(tables)


def of_kind(kind: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The reports of a kind by name, those on accelerators first."""
    reports = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    entries = [(name, report) for name, report in reports.items() if report["kind"] == kind]
    return dict(sorted(entries, key=lambda entry: (entry[1]["machine"]["device"] == "cpu", entry[0])))


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def main(arguments: Sequence[str]) -> None:
    """Print the rows, and write them into the pages if asked."""
    files = [Path(name) for name in arguments if name != "--write"]
    rows = "\n".join(pages.line(row(read(path), path.stem)) for path in files) or table()
    print(rows)
    if "--write" in arguments and not files:
        pages.rewrite(PAGE, MARKS, rows)
        pages.rewrite(COSTS, MARKS, bench_table(of_kind(DEVICE)))


if __name__ == "__main__":
    main(sys.argv[1:])
