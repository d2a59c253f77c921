"""The tables of user-verified runs in docs/matrix.md and docs/performance.md, from docs/verified/.

    python ci/verified.py            # check every report, and print the rows
    python ci/verified.py --write    # and put them into the pages
    python ci/verified.py FILE ...   # check these reports alone

Each report is a JSON file that `npu-replay smoke --json` wrote (docs/smoke.md says what is in it), or that
`bash ci/device.sh` did: a row of its parts, and its bench as ratios.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "matrix.md"
FOLDER = ROOT / "docs" / "verified"
COSTS = ROOT / "docs" / "performance.md"
START, END = "<!-- verified -->", "<!-- end of verified -->"
SMOKE, DEVICE = "npu_replay smoke", "npu_replay device"
TITLES = (
    "device",
    "CANN or CUDA",
    "torch, Python",
    "Megatron-core",
    "MindSpeed",
    "processes",
    "features",
    "npu_replay",
    "day",
    "report",
)
DEVICE_TITLES = (
    "device",
    "CANN or CUDA",
    "torch, Python",
    "Megatron-core",
    "transformers",
    "passed",
    "failed",
    "not tried",
    "npu_replay",
    "day",
    "report",
)
_AXES = ("tp", "cp", "pp", "vp", "ep", "etp")

# What a report has to hold: a type, or a dict of what is in it.
_TEXT, _COUNT = (str,), (int,)
SCHEMA: dict[str, Any] = {
    "schema": _COUNT,
    "kind": _TEXT,
    "passed": (bool,),
    "date": _TEXT,
    "options": dict.fromkeys(("tp", "pp", "ep", "cp", "vp", "etp"), _COUNT)
    | {"recompute": (bool,), "device": _TEXT},
    "processes": _COUNT,
    "versions": dict.fromkeys(
        ("npu_replay", "python", "torch", "megatron-core", "mindspeed", "torch_npu", "numpy"), _TEXT
    ),
    "machine": dict.fromkeys(("device", "name", "cann", "cuda", "processor", "system"), _TEXT),
    "sizes": dict.fromkeys(("layers", "experts", "topk", "micro_batches"), _COUNT),
    "results": (list,),
    "seconds": (dict,),
}
RESULT: dict[str, Any] = {
    "feature": _TEXT,
    "case": _TEXT,
    "result": _TEXT,
    "why": _TEXT,
    "rank": (int, type(None)),
    "seconds": (float, int),
    "trace": (list,),
}
DEVICE_SCHEMA: dict[str, Any] = {
    "schema": _COUNT,
    "kind": _TEXT,
    "passed": (bool,),
    "date": _TEXT,
    "quick": (bool,),
    "devices": _COUNT,
    "versions": SCHEMA["versions"] | dict.fromkeys(("transformers", "pytest"), _TEXT),
    "machine": SCHEMA["machine"],
    "parts": (list,),
}
PART: dict[str, Any] = {
    "part": _TEXT,
    "result": _TEXT,
    "why": _TEXT,
    "rc": (int, type(None)),
    "seconds": (float, int),
    "passed": _COUNT,
    "skipped": (list,),
    "found": (dict, type(None)),
}


def problems(found: Any) -> list[str]:
    """What is wrong with a report; nothing if it is one."""
    if isinstance(found, dict) and found.get("kind") == DEVICE:
        return _device_problems(found)
    wrong = list(_differences(found, SCHEMA, "the report"))
    if wrong:
        return wrong
    if (found["schema"], found["kind"]) != (1, SMOKE):
        return [f"schema {found['schema']} of {found['kind']!r} isn't known here"]
    for number, one in enumerate(found["results"]):
        wrong += _differences(one, RESULT, f"result {number}")
        if not wrong and one["result"] not in ("PASS", "FAIL", "SKIP"):
            wrong.append(f"result {number} is {one['result']!r}")
    if not wrong and found["passed"] != (bool(found["results"]) and not _named(found, "FAIL")):
        wrong.append("passed doesn't agree with the results")
    return wrong


def _device_problems(found: dict[str, Any]) -> list[str]:
    wrong = list(_differences(found, DEVICE_SCHEMA, "the report"))
    if wrong:
        return wrong
    if found["schema"] != 1:
        return [f"schema {found['schema']} of {DEVICE!r} isn't known here"]
    for number, one in enumerate(found["parts"]):
        wrong += _differences(one, PART, f"part {number}")
        if not wrong and one["result"] not in ("PASS", "FAIL", "MISSING"):
            wrong.append(f"part {number} is {one['result']!r}")
    results = {part["result"] for part in found["parts"]} if not wrong else set()
    if not wrong and found["passed"] != ("FAIL" not in results and "PASS" in results):
        wrong.append("passed doesn't agree with the parts")
    return wrong


def _differences(found: Any, wanted: Any, where: str) -> Iterator[str]:
    if isinstance(wanted, tuple):
        if type(found) not in wanted:
            yield f"{where} is {type(found).__name__}"
        return
    if not isinstance(found, dict):
        yield f"{where} is no object"
        return
    if found.keys() != wanted.keys():
        yield f"{where}: {', '.join(sorted(found.keys() ^ wanted.keys()))} missing or not known"
        return
    for name, inner in wanted.items():
        yield from _differences(found[name], inner, f"{where}, {name}")


def row(found: dict[str, Any], name: str) -> str:
    """A report as a row of the table."""
    machine, versions, options = found["machine"], found["versions"], found["options"]
    device = machine["name"] or {"cpu": "a CPU"}.get(machine["device"], machine["device"])
    sizes = [f"{axis} {options[axis]}" for axis in _AXES if options[axis] > 1]
    sizes += ["recompute"] if options["recompute"] else []
    torch = versions["torch"] + (f" ({versions['torch_npu']})" if versions["torch_npu"] else "")
    failed = _named(found, "FAIL")
    tried = [*_named(found, "PASS"), *failed]
    features = f"all {len(set(tried))}" if not failed else f"not {', '.join(failed)}"
    cells = (
        f"{device}, {machine['processor']}",
        machine["cann"] or machine["cuda"],
        f"{torch}, {versions['python']}",
        versions["megatron-core"],
        versions["mindspeed"],
        ", ".join([str(found["processes"]), *sizes]),
        features,
        versions["npu_replay"],
        found["date"][:10],
        f"[{name}](verified/{name}.json)",
    )
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def device_row(found: dict[str, Any], name: str) -> str:
    """A report of ci/device.sh as a row of its table."""
    machine, versions = found["machine"], found["versions"]
    parts = {
        result: ", ".join(_tried(part) for part in found["parts"] if part["result"] == result)
        for result in ("PASS", "FAIL", "MISSING")
    }
    cells = (
        f"{found['devices']} x {machine['name'] or 'a CPU'}, {machine['processor']}",
        machine["cann"] or machine["cuda"],
        f"{versions['torch']}, {versions['python']}",
        versions["megatron-core"],
        versions["transformers"],
        *parts.values(),
        versions["npu_replay"],
        found["date"][:10],
        f"[{name}](verified/{name}.json)",
    )
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _tried(part: dict[str, Any]) -> str:
    return f"{part['part']} ({part['passed']})" if part["passed"] else str(part["part"])


def bench_table(reports: dict[str, dict[str, Any]]) -> str:
    """What the bench of each report of ci/device.sh measured, as ratios to the first way."""
    rows: dict[tuple[str, int, str], dict[str, str]] = {}
    for name, report in reports.items():
        for part in report["parts"]:
            for row in (part["found"] or {}).get("rows", []) if part["part"] == "bench" else []:
                ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
                rows.setdefault((row["what"], row["tokens"], row["way"]), {})[name] = ratio
    names = [name for name in reports if any(name in ratios for ratios in rows.values())]
    lines = [_line(["", "tokens", "way", *(f"[{name}](verified/{name}.json)" for name in names)])]
    lines.append("|---" * (3 + len(names)) + "|")
    for (what, tokens, way), ratios in rows.items():
        cells = [ratios.get(name, "") for name in names]
        if any(
            not cell.startswith("1.00 (1.00-1.00)") for cell in cells
        ):  # the way that the others are held against
            lines.append(_line([what, f"{tokens:,}" if tokens else "", way, *cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _named(found: dict[str, Any], result: str) -> list[str]:
    """The features with such a result, in order, each once."""
    names = [one["feature"] for one in found["results"] if one["result"] == result]
    return list(dict.fromkeys(names))


def _plain(cell: str) -> str:
    """What a sender wrote can't end a cell or a row."""
    return " ".join(cell.replace("|", "/").split())


def table(folder: Path = FOLDER) -> str:
    """The rows of all reports, those on accelerators first: smoke's, then those of ci/device.sh.

    Raises:
        ValueError: one isn't a report; says which and why.
    """
    tables = []
    for kind, titles, make in ((SMOKE, TITLES, row), (DEVICE, DEVICE_TITLES, device_row)):
        reports = of_kind(kind, folder)
        rows = [make(report, name) for name, report in reports.items()]
        tables.append("\n".join([_line(titles), "|---" * len(titles) + "|", *rows]))
    return "\n\n".join(tables)


def of_kind(kind: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The reports of a kind by name, those on accelerators first."""
    reports = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    names = [name for name, report in reports.items() if report["kind"] == kind]
    return {name: reports[name] for name in sorted(names, key=lambda name: (_on_cpu(reports[name]), name))}


def _on_cpu(report: dict[str, Any]) -> bool:
    return bool(report["machine"]["device"] == "cpu")


def read(path: Path) -> dict[str, Any]:
    """A report that was checked."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    wrong = problems(found)
    if wrong:
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    checked: dict[str, Any] = found
    return checked


def rewritten(page: str, rows: str) -> str:
    """The page with these rows between its marks."""
    head, rest = page.split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n\n{rows}\n\n{END}{tail}"


def main(arguments: Sequence[str]) -> int:
    """Print the rows; return 1 if a report is none."""
    files = [Path(name) for name in arguments if name != "--write"]
    try:
        if files:
            for path in files:
                report = read(path)
                print((row if report["kind"] == SMOKE else device_row)(report, path.stem))
            return 0
        rows = table()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(rows)
    if "--write" in arguments:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        costs = bench_table(of_kind(DEVICE))
        COSTS.write_text(rewritten(COSTS.read_text(encoding="utf-8"), costs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
