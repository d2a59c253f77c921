"""The promises about imports: npu_replay imports no framework, and the core imports no compat."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import npu_replay

PACKAGE = Path(npu_replay.__file__).parent
NOT_IMPORTED = (
    "transformers",
    "megatron",
    "mindspeed",
    "torch_npu",
    "vllm",
    "sglang",
    "verl",
    "tensordict",
    "ray",
    "hydra",
    "safetensors",
    "matplotlib",
    "typer",
    "rich",
)
# The face: what a user calls. Everything else in the package is the core.
FACE = {
    "__init__",
    "__main__",
    "bench",
    "bench_decode",
    "bench_gather",
    "captured",
    "cli",
    "commands",
    "devices",
    "doctor",
    "inspect_report",
    "inspecting",
    "installing",
    "opening",
    "plots",
    "reporting",
    "smoke",
    "smoke_checks",
    "smoke_job",
    "smoke_model",
    "smoke_options",
    "smoke_report",
    "smoke_witness",
}
CORE = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in FACE)


def imported(source: Path) -> set[str]:
    """Every module that a file imports, at its top or anywhere else, in full."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.name} imports relatively"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_importing_and_reporting_imports_no_framework() -> None:
    code = f"""
import sys, npu_replay
str(npu_replay.report())
import npu_replay.cli, npu_replay.self_test
print([name for name in {NOT_IMPORTED} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("source", CORE, ids=lambda path: path.stem)
def test_the_core_imports_no_compat_and_no_face(source: Path) -> None:
    names = imported(source)
    assert not any(name.split(".")[:2] == ["npu_replay", "compat"] for name in names)
    assert not {f"npu_replay.{module}" for module in FACE} & names


@pytest.mark.parametrize("source", CORE, ids=lambda path: path.stem)
def test_the_core_needs_torch_and_numpy_alone(source: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch", "numpy", "npu_replay"}
    if source.stem in ("route_file", "route_store"):
        allowed |= {"safetensors"}  # on use, with an error that says how to get it
    assert {name.partition(".")[0] for name in imported(source)} <= allowed


def test_compat_imports_no_face() -> None:
    folder = Path(npu_replay.compat.__file__).parent
    for source in folder.rglob("*.py"):
        assert not {f"npu_replay.{module}" for module in FACE} & imported(source), source.name


def test_no_module_in_compat_imports_its_product_at_its_top() -> None:
    folder = Path(npu_replay.compat.__file__).parent
    for source in folder.rglob("*.py"):
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {str(node.module).partition(".")[0]}
            else:
                continue
            assert not names & set(NOT_IMPORTED), source.name
