"""The table of captured paths in docs/dev/engine-limits.md, from what ci/vllm_ascend.sh wrote down.

NPU_REPLAY_VLLM_ASCEND_RESULTS=out/captures.json bash ci/vllm_ascend.sh
python ci/captures.py out/captures.json --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pages

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "engine-limits.md"
MARKS = "<!-- captures: written by ci/captures.py -->", "<!-- end of captures -->"
RELEASED = "as released"
PLUGIN = "with the plug-in"
_WORDS = {
    "sequence_parallel": "flash comm",
    "mix_placement": "mixed placement",
    "eplb": "EPLB",
    "310P": "310P",
    "kv_cache_twice": "KV cache made twice",
}

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By release, then as released or with the plug-in, then by path: rows right of all, or errors."""


def path_of(name: str) -> str:
    """A case's name in words; those that differ in the way of quantizing alone have the same."""
    scheme, comm, tp, dp, *more = name.split("-")
    quantized = "unquantized" if scheme == "unquantized" else "quantized"
    sizes = [f"{kind.upper()} {size}" for kind, size in ((tp[:2], tp[2:]), (dp[:2], dp[2:])) if size != "1"]
    told = (_WORDS.get(one, one.replace("_", " ")) for one in more)
    return ", ".join([quantized, comm, *sizes, *told])


def table(results: Results) -> str:
    """A column a release, and a row for the paths that came out alike.

    A cell has the right rows by itself, and with the plug-in all; empty where a release lacks the path.

    Raises:
        ValueError: with the plug-in something isn't right.
    """
    of: dict[str, dict[str, list[tuple[Any, Any]]]] = {}
    for release, found in results.items():
        for name, after in found[PLUGIN].items():
            if not isinstance(after, dict) or "broken" in name:
                continue
            if "errors" in after or after["right"] != after["of"]:
                raise ValueError(f"{release}, {name}: {after}")
            if name in found[RELEASED]:
                pairs = of.setdefault(path_of(name), {}).setdefault(release, [])
                pairs.append((found[RELEASED][name], after))
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, by in sorted(of.items(), key=lambda pair: (not pair[0].startswith("un"), pair[0])):
        kind, _, rest = path.partition(", ")
        cells = []
        for pairs in (by.get(release, []) for release in results):
            rows = sum(after["of"] for _, after in pairs)
            errors = [error.partition(":")[0] for before, _ in pairs for error in before.get("errors", ())]
            right = errors[0] if errors else sum(before["right"] for before, _ in pairs)
            cells.append("" if not pairs else f"all {rows}" if right == rows else f"{right} → all {rows}")
        alike.setdefault((kind, *cells), []).append(rest)
    lines = [[f"{kind}: {'; '.join(rests)}", *cells] for (kind, *cells), rests in alike.items()]
    return pages.table(["path", *results], lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table, or put it into the page."""
    (folder,) = [Path(name) for name in arguments if name != "--write"]
    files = sorted(folder.glob("*.json"))
    made = table({file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files})
    if "--write" in arguments:
        pages.rewrite(PAGE, MARKS, made)
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
