"""The table of user-verified runs: what a report has to hold, and that docs/versions.md shows them all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ci_module import ci_module
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, Report, Result

ROOT = Path(__file__).parents[2]
verified = ci_module("verified")


def written(*results: Result) -> dict[str, Any]:
    """What the command writes."""
    options = Options(tp=2, ep=2, recompute=True)
    report = Report(options, 4, torch.device("cpu"), list(results))
    return json.loads(report.to_json())


GOOD = (Result("replay", "softmax", PASS, "seen", None, 0.5), Result("recompute", "softmax", PASS, "seen"))


def test_the_pages_show_the_reports_that_are_here() -> None:
    costs = verified.bench_table(verified.of_kind(verified.DEVICE))
    for page, measured in ((verified.PAGE, verified.table()), (verified.COSTS, costs)):
        text = page.read_text(encoding="utf-8")
        written_anew = verified.pages.rewritten(text, verified.MARKS, measured)
        assert text == written_anew, "run python ci/verified.py --write"


SPOILT: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda found: found.update(schema=2), "schema 2"),
    (lambda found: found.update(host="node17"), "host missing or not known"),
    (lambda found: found.pop("machine"), "machine missing or not known"),
]
OF_SMOKE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda found: found["options"].update(tp=True), "options, tp is bool"),
    (lambda found: found["results"][0].update(result="OK"), "result 0 is 'OK'"),
    (lambda found: found["results"][0].update(result="FAIL"), "passed doesn't agree"),
    (lambda found: found["results"].clear(), "passed doesn't agree"),
]
OF_DEVICE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda found: found.update(passed=True), "passed doesn't agree"),
    (lambda found: found.update(parts=[{"part": "smoke"}]), "part 0: "),
]


def test_what_is_no_report_is_refused() -> None:
    """What the commands write is one, also where something failed."""
    device: dict[str, Any] = json.loads((verified.FOLDER / "device-cpu-quick.json").read_text())
    smoke = next(part for part in device["parts"] if part["part"] == "smoke")
    smoke.update(result="FAIL", rc=1, why="it broke")
    device["passed"] = False
    failed = Result("bytes", "groups", FAIL, "others", 3, 0.1, ["a.py:1 f"])
    assert verified.problems(written(*GOOD, failed)) == []
    for report, spoilt in ((written(*GOOD), SPOILT + OF_SMOKE), (device, SPOILT + OF_DEVICE)):
        assert verified.problems(report) == []
        for spoil, problem in spoilt:
            wrong = copy.deepcopy(report)
            spoil(wrong)
            assert problem in "; ".join(verified.problems(wrong))
