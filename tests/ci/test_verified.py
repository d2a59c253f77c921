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
    report = Report(Options(tp=2, ep=2, recompute=True), 4, torch.device("cpu"), list(results))
    return json.loads(report.to_json())


GOOD = (Result("replay", "softmax", PASS, "seen", None, 0.5), Result("recompute", "softmax", PASS, "seen"))


def test_the_page_shows_the_reports_that_are_here() -> None:
    page = verified.PAGE.read_text(encoding="utf-8")
    assert page == verified.pages.rewritten(page, verified.MARKS, verified.table()), (
        "run python ci/verified.py --write"
    )
    assert list(verified.FOLDER.glob("*.json"))
    costs = verified.COSTS.read_text(encoding="utf-8")
    measured = verified.bench_table(verified.of_kind(verified.DEVICE))
    assert costs == verified.pages.rewritten(costs, verified.MARKS, measured), (
        "run python ci/verified.py --write"
    )


def test_what_the_command_writes_is_a_report() -> None:
    assert verified.problems(written(*GOOD)) == []
    failed = Result("bytes", "groups", FAIL, "others", 3, 0.1, ["a.py:1 f"])
    assert verified.problems(written(*GOOD, failed)) == []


SPOILT: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda found: found.update(schema=2), "schema 2"),
    (lambda found: found.update(host="node17"), "host missing or not known"),
    (lambda found: found.pop("machine"), "machine missing or not known"),
    (lambda found: found["versions"].update(torch=2.9), "versions, torch is float"),
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
    of_device = json.loads((verified.FOLDER / "device-cpu-quick.json").read_text()) | {"passed": False}
    next(part for part in of_device["parts"] if part["part"] == "smoke")["result"] = "FAIL"
    assert verified.problems(copy.deepcopy(of_device)) == []
    for made, spoilt in ((written(*GOOD), SPOILT + OF_SMOKE), (of_device, SPOILT + OF_DEVICE)):
        for spoil, words in spoilt:
            report = copy.deepcopy(made)
            spoil(report)
            assert words in "; ".join(verified.problems(report))
