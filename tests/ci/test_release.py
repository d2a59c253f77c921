"""What a release is built from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import tomllib

import npu_replay
from ci_module import ci_module

ROOT = Path(__file__).parents[2]
release_tree = ci_module("release_tree")
ADDRESS = "https://forge.example/lab/npu_replay"


def test_the_version_stands_in_one_place() -> None:
    assert release_tree.version() == npu_replay.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"]
    newest = re.search(r"(?m)^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest[1] in ("Unreleased", npu_replay.__version__)


def test_a_package_page_has_no_link_that_needs_the_repository(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml", "npu_replay/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert release_tree.main([str(tmp_path), ADDRESS]) == 0
    targets = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert all(one.startswith(("https://", "#")) for one in targets)
    version = npu_replay.__version__
    ours = [re.fullmatch(f"{ADDRESS}/(raw|blob)/v{version}/([^#]+)(#.*)?", one) for one in targets]
    files = [(link[1], ROOT / link[2]) for link in ours if link]
    assert {file.suffix for kind, file in files if kind == "raw"} == {".png"}
    assert len(files) > 20
    assert all(file.exists() for _, file in files)
