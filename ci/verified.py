"""The tables of docs/versions.md, and the ratios in docs/dev/performance.md, from docs/dev/verified/.

    python ci/verified.py            # check every report, and print the rows
    python ci/verified.py --write    # and put them into the pages
    python ci/verified.py FILE ...   # check these reports alone

Each report is a JSON file that `npu-replay smoke --out` wrote (docs/dev/notes.md), or that
`bash ci/device.sh` did: a row of its parts, and its bench as ratios.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / "docs" / "dev" / "verified"
COSTS = ROOT / "docs" / "dev" / "performance.md"
MARKS = "<!-- verified -->", "<!-- end of verified -->"
SMOKE, DEVICE = "npu_replay smoke", "npu_replay device"
DEVICES = {"npu": "NPU", "cuda": "CUDA", "cpu": "CPU"}
_AXES = ("tp", "cp", "pp", "vp", "ep", "etp")
RESULTS = {SMOKE: ("results", {"PASS", "FAIL", "SKIP"}), DEVICE: ("parts", {"PASS", "FAIL", "MISSING"})}
"""Where the results of each kind of report are, and what one may be."""

# What a report has to hold: types, a dict of what is in it, or a list of what each of its entries holds.
_TEXT, _COUNT, _FLAG, _NONE = str, int, bool, type(None)
_VERSIONS = ("npu_replay", "python", "torch", "megatron-core", "mindspeed", "torch_npu", "numpy")
_OF_DEVICE = (*_VERSIONS, "transformers", "pytest")
_BOTH: dict[str, Any] = {
    "schema": _COUNT,
    "kind": _TEXT,
    "passed": _FLAG,
    "date": _TEXT,
    "machine": dict.fromkeys(("device", "name", "cann", "cuda", "processor", "system"), _TEXT),
}
SCHEMAS: dict[str, dict[str, Any]] = {
    SMOKE: _BOTH
    | {
        "versions": dict.fromkeys(_VERSIONS, _TEXT),
        "options": dict.fromkeys(_AXES, _COUNT) | {"recompute": _FLAG, "model": _TEXT, "device": _TEXT},
        "processes": _COUNT,
        "sizes": dict.fromkeys(("layers", "experts", "topk", "micro_batches"), _COUNT),
        "seconds": (dict,),
        "results": [
            dict.fromkeys(("feature", "case", "result", "why"), _TEXT)
            | {"rank": (int, _NONE), "seconds": (float, int), "trace": (list,)}
        ],
    },
    DEVICE: _BOTH
    | {
        "versions": dict.fromkeys(_OF_DEVICE, _TEXT),
        "quick": _FLAG,
        "devices": _COUNT,
        "parts": [
            dict.fromkeys(("part", "result", "why"), _TEXT)
            | {"passed": _COUNT, "skipped": (list,), "rc": (int, _NONE)}
            | {"seconds": (float, int), "found": (dict, _NONE)}
        ],
    },
}
_MACHINE = ("device", "CANN or CUDA", "torch, Python", "Megatron-core")
_SENT = ("npu_replay", "day", "from", "report")
TITLES = {
    SMOKE: (*_MACHINE, "MindSpeed", "processes", "features", *_SENT),
    DEVICE: (*_MACHINE, "transformers", "passed", "failed", "not tried", *_SENT),
}


def smoke_row(found: dict[str, Any], name: str) -> list[str]:
    """A report of the smoke test as a row of its table."""
    machine, versions, options = found["machine"], found["versions"], found["options"]
    device = machine["name"] or {"cpu": "a CPU"}.get(machine["device"], machine["device"])
    sizes = [f"{axis} {options[axis]}" for axis in _AXES if options[axis] > 1]
    sizes += ["recompute"] if options["recompute"] else []
    sizes += ["HybridModel"] if options["model"] == "hybrid" else []
    torch = versions["torch"] + (f" ({versions['torch_npu']})" if versions["torch_npu"] else "")
    named = {one["feature"]: one["result"] for one in found["results"] if one["result"] != "SKIP"}
    failed = dict.fromkeys(one["feature"] for one in found["results"] if one["result"] == "FAIL")
    return [
        f"{device}, {machine['processor']}",
        machine["cann"] or machine["cuda"],
        f"{torch}, {versions['python']}",
        versions["megatron-core"],
        versions["mindspeed"],
        ", ".join([str(found["processes"]), *sizes]),
        f"not {', '.join(failed)}" if failed else f"all {len(named)}",
        *_about(found, name),
    ]


def device_row(found: dict[str, Any], name: str) -> list[str]:
    """A report of ci/device.sh as a row of its table."""
    machine, versions = found["machine"], found["versions"]
    return [
        f"{found['devices']} x {machine['name'] or 'a CPU'}, {machine['processor']}",
        machine["cann"] or machine["cuda"],
        f"{versions['torch']}, {versions['python']}",
        versions["megatron-core"],
        versions["transformers"],
        *(
            ", ".join(
                f"{part['part']} ({part['passed']})" if part["passed"] else part["part"]
                for part in found["parts"]
                if part["result"] == result
            )
            for result in ("PASS", "FAIL", "MISSING")
        ),
        *_about(found, name),
    ]


def _about(found: dict[str, Any], name: str) -> list[str]:
    sender, known, _ = name.partition("--")
    link = f"[{name}](dev/verified/{name}.json)"
    return [found["versions"]["npu_replay"], found["date"][:10], sender if known else "this project", link]


def problems(found: Any) -> list[str]:
    """What is wrong with a report; nothing if it is one."""
    kind = DEVICE if isinstance(found, dict) and found.get("kind") == DEVICE else SMOKE
    if wrong := list(_differences(found, SCHEMAS[kind], "the report")):
        return wrong
    if (found["schema"], found["kind"]) != (1, kind):
        return [f"schema {found['schema']} of {found['kind']!r} isn't known here"]
    inside, known = RESULTS[kind]
    results = [entry["result"] for entry in found[inside]]
    wrong = [
        f"{inside.removesuffix('s')} {number} is {result!r}"
        for number, result in enumerate(results)
        if result not in known
    ]
    if not wrong and found["passed"] != ("FAIL" not in results and "PASS" in results):
        wrong.append(f"passed doesn't agree with the {inside}")
    return wrong


def _differences(found: Any, wanted: Any, where: str) -> Iterator[str]:
    kinds = wanted if isinstance(wanted, tuple) else (wanted if isinstance(wanted, type) else type(wanted),)
    if type(found) not in kinds:
        yield f"{where} is {type(found).__name__}"
    elif isinstance(wanted, list):
        for number, entry in enumerate(found):
            yield from _differences(entry, wanted[0], f"{where.removesuffix('s')} {number}")
    elif isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            yield f"{where}: {', '.join(sorted(found.keys() ^ wanted.keys()))} missing or not known"
            return
        for name, inner in wanted.items():
            yield from _differences(found[name], inner, name if where == "the report" else f"{where}, {name}")


def row(found: dict[str, Any], name: str) -> list[str]:
    """A report as a row of its kind's table."""
    return (smoke_row if found["kind"] == SMOKE else device_row)(found, name)


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
        seen = {report["machine"]["device"] for report in reports.values()}
        nobodys = [
            [f"{DEVICES[one]}: no report yet", *[""] * (len(titles) - 1)]
            for one in DEVICES
            if one not in seen
        ]
        tables.append(pages.table(titles, [*rows, *nobodys]))
    return "\n\n".join(tables)


def of_kind(kind: str, folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The reports of a kind by name, those on accelerators first."""
    reports = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    found = [(name, report) for name, report in reports.items() if report["kind"] == kind]
    return dict(sorted(found, key=lambda one: (one[1]["machine"]["device"] == "cpu", one[0])))


def read(path: Path) -> dict[str, Any]:
    """A report that was checked."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if found.get("kind") == SMOKE and isinstance(found.get("options"), dict):
        found["options"].setdefault("model", "gpt")  # older reports don't name it: there was no other
    if wrong := problems(found):
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the rows; return 1 if a report is none."""
    files = [Path(name) for name in arguments if name != "--write"]
    try:
        for path in files:
            report = read(path)
            print(pages.line(row(report, path.stem)))
        rows = "" if files else table()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not files:
        print(rows)
        if "--write" in arguments:
            pages.rewrite(PAGE, MARKS, rows)
            pages.rewrite(COSTS, MARKS, bench_table(of_kind(DEVICE)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
