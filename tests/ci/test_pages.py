"""What ci/ makes of pages and trees: the site, pages of the API, a release, the rows of users' reports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import npu_replay
from ci_module import ci_module
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, Report, Result

ROOT = Path(__file__).parents[2]
api_page = ci_module("api_page")
pages = ci_module("site_pages")
release_tree = ci_module("release_tree")
verified = ci_module("verified")


def test_the_pages_of_the_api_show_how_each_name_is_called() -> None:
    """`python ci/api_page.py --write` writes them."""
    assert "RoutedExperts.take(rows)" in api_page.signatures()
    for page in api_page.PAGES:
        text = page.read_text(encoding="utf-8")
        assert api_page.pages.rewritten(text, api_page.MARKS, api_page.block()) == text


@pytest.mark.parametrize(
    ("page", "link", "in_the_site"),
    [
        ("quickstart.md", "[a](metrics.md#keys)", "[a](metrics.md#keys)"),
        ("zh/quickstart.md", "[a](../metrics.md)", "[a](../metrics.md)"),
        ("index.md", "[a](../README.md#install)", "[a](project/readme.md#install)"),
        ("zh/x.md", "[a](../../CONTRIBUTING.md)", "[a](../project/contributing.md)"),
        ("project/readme.md", "[a](docs/metrics.md)", "[a](../metrics.md)"),
        ("project/readme.md", "![a](docs/images/grpo.png)", "![a](../images/grpo.png)"),
        ("project/readme.md", "[中文](README.zh.md)", "[中文](../zh/index.md)"),
        ("zh/index.md", "[a](docs/metrics.md)", "[a](../metrics.md)"),
        ("grpo.md", "[the loop](../examples/grpo/loop.py)", "[the loop](project/examples/grpo/loop.py.md)"),
        ("grpo.md", "[the tests](../tests/live/test_grpo.py)", "the tests"),
        ("zh/x.md", "[a](../../examples/README.md#verl)", "[a](../project/examples/readme.md#verl)"),
        ("vllm.md", "[a](../examples/multi_turn.py)", "[a](project/examples/multi_turn.py.md)"),
        ("project/examples/readme.md", "[a](verl/npu_fsdp2.sh)", "[a](verl/npu_fsdp2.sh.md)"),
        ("project/examples/readme.md", "[a](../docs/metrics.md)", "[a](../../metrics.md)"),
        ("project/readme.md", "![a](https://img.example.org/a.svg)", ""),  # nothing from another host
        ("grpo.md", "[a](https://example.org/x.md) [b](#c)", "[a](https://example.org/x.md) [b](#c)"),
    ],
)
def test_links_become_those_of_the_site(page: str, link: str, in_the_site: str) -> None:
    known = {"metrics.md", "images/grpo.png", *pages.OUTSIDE.values(), *pages.SHOWN.values()}
    assert pages.relinked(link, page, known) == in_the_site


# A release

ADDRESS = "https://forge.example/lab/npu_replay"


def test_a_package_page_has_no_link_that_needs_the_repository(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml", "npu_replay/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert release_tree.main([str(tmp_path), ADDRESS]) == 0
    targets = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert all(target.startswith(("https://", "#")) for target in targets)
    version = npu_replay.__version__
    ours = [re.fullmatch(f"{ADDRESS}/(raw|blob)/v{version}/([^#]+)(#.*)?", target) for target in targets]
    files = [(link[1], ROOT / link[2]) for link in ours if link]
    assert {file.suffix for kind, file in files if kind == "raw"} == {".png"}
    assert len(files) > 20
    assert all(file.exists() for _, file in files)


# docs/versions.md has the reports that users have sent


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


def test_what_smoke_writes_is_a_row_and_a_fail_is_shown_as_one() -> None:
    """Of a bench and tests on a device: tests/device/test_device_sh.py."""
    results = [Result("replay", "softmax", PASS, "seen"), Result("recompute", "softmax", FAIL, "others", 3)]
    report = json.loads(
        Report(Options(tp=2, ep=2, recompute=True), 4, torch.device("cpu"), results).to_json()
    )
    row = verified.row(report, "lab--cpu")
    assert len(row) == len(verified.TITLES[verified.SMOKE])
    assert {"4, tp 2, ep 2, recompute", "not recompute", "lab"} <= {*row}
