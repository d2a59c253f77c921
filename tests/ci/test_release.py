"""What a release is built from, and what the forges run: nothing but .ci/run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomllib
import yaml

import npu_replay

ROOT = Path(__file__).parents[2]
ADDRESS = "https://forge.example/lab/npu_replay"


@pytest.fixture(scope="module")
def release_tree() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "ci"))
        return importlib.import_module("release_tree")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("README.md", "pyproject.toml", "npu_replay/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def test_the_version_stands_in_one_place(release_tree: ModuleType) -> None:
    assert release_tree.version() == npu_replay.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"]
    newest = re.search(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest is not None
    assert newest[1] in ("Unreleased", npu_replay.__version__)


def test_a_package_page_has_no_link_that_needs_the_repository(release_tree: ModuleType, tree: Path) -> None:
    assert release_tree.main([str(tree), ADDRESS]) == 0
    page = (tree / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert all(one.startswith(("https://", "#")) for one in targets)
    version = npu_replay.__version__
    ours = [re.fullmatch(f"{ADDRESS}/(raw|blob)/v{version}/([^#]+)(#.*)?", one) for one in targets]
    found = [one for one in ours if one]
    assert {Path(one[2]).suffix for one in found if one[1] == "raw"} == {".png"}
    assert len(found) > 20
    assert [one[2] for one in found if not (ROOT / one[2]).exists()] == []


def test_the_forges_run_ci_run_and_nothing_else() -> None:
    github: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = github["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    gitlab: dict[str, Any] = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text(encoding="utf-8"))
    (job,) = gitlab.values()
    assert job["script"] == ["bash .ci/run"]


def test_each_template_asks_for_doctors_and_smokes_report() -> None:
    templates = [
        ROOT / ".github/ISSUE_TEMPLATE/problem.yml",
        ROOT / ".gitlab/issue_templates/problem.md",
        ROOT / ".gitee/ISSUE_TEMPLATE.zh-CN.md",
    ]
    smoke = re.search(r"(?m)^torchrun .* smoke .*$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert smoke is not None
    for one in templates:
        text = one.read_text(encoding="utf-8")
        assert "npu-replay doctor --json" in text, one
        assert smoke[0] in text, one
    for one in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(one.read_text(encoding="utf-8"))
