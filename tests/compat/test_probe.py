"""compat.probe: products are found, read and judged without being imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Capability, Product

PACKAGE_INFO = "MAJOR = 0\nMINOR = 12\nPATCH = 1\nPRE_RELEASE = {!r}\n__version__ = '.'.join(['unread'])\n"


def write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def megatron(path: Path, *, package_info: str | None = PACKAGE_INFO.format(""), config: str = "") -> Path:
    core = path / "megatron" / "core"
    write(core / "__init__.py", "raise RuntimeError('imported')")
    for name in ("parallel_state.py", "transformer/moe/router.py", "transformer/moe/moe_utils.py"):
        write(core / name)
    write(core / "transformer/transformer_config.py", f"class TransformerConfig:\n    tp: int = 1\n{config}")
    if package_info is not None:
        write(core / "package_info.py", package_info)
    return core


def product(name: str) -> Product:
    return next(product for product in probe.products() if product.name == name)


def capability(name: str) -> Capability:
    return next(entry for entry in probe.capabilities(probe.products()) if entry.name == name)


def test_an_empty_machine_has_nothing_and_no_problem(path: Path) -> None:
    assert [(p.installed, p.version, p.where, p.problem) for p in probe.products()] == [
        (False, "", "", "") for _ in probe._KNOWN
    ]
    for entry in probe.capabilities(probe.products()):
        assert entry.state == "missing"
        assert entry.why
        assert bool(entry.remedy) == (entry.name != "Megatron's own replay")


def test_megatron_on_the_path_alone_tells_its_version_and_is_not_imported(path: Path) -> None:
    before = set(sys.modules)
    core = megatron(path)
    assert product("megatron-core") == Product("megatron-core", True, "0.12.1", str(core))
    assert not any(name.startswith("megatron") for name in set(sys.modules) - before)
    megatron(path, package_info=PACKAGE_INFO.format("rc0"))
    assert product("megatron-core").version == "0.12.1rc0"


@pytest.mark.parametrize(
    ("source", "metadata", "version"),
    [
        ("__version__ = version = '0.11.0'", "", "0.11.0"),
        ("# coding: latin-1\n# größer\n__version__: str\n__version__: str = '1.2'", "", "1.2"),
        ("__version__ = compute()", "Name: vllm\nVersion: 2.3.0\n", "2.3.0"),
        ("", "", ""),  # damaged metadata
    ],
)
def test_a_version_is_read_from_source_and_else_from_the_distribution(
    path: Path, source: str, metadata: str, version: str
) -> None:
    write(path / "vllm/__init__.py")
    (path / "vllm/_version.py").write_bytes(source.encode("latin-1"))
    write(path / "vllm-2.3.0.dist-info/METADATA", metadata)
    assert product("vllm") == Product("vllm", True, version, str(path / "vllm"))


def test_a_folder_without_init_is_no_product(path: Path) -> None:
    for file in (
        "mindspeed/features.py",
        "verl/setup.py",
        "verl/verl/__init__.py",
        "megatron/energon/__init__.py",
    ):
        write(path / file)
    write(path / "megatron/core/package_info.py")  # copied by half
    for name in ("megatron-core", "mindspeed", "verl"):
        assert product(name) == Product(name, installed=False)
    assert not import_hook._failures, "to be looked for is not to be imported: no shim was got ready"


def test_a_finder_may_give_a_path_in_the_place_of_its_text(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports become JSON."""
    file = path / "of_a_finder/__init__.py"
    write(file)

    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if name != "verl":
            return None
        folders: list[Any] = [file.parent]
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert product("verl").where == str(file.parent)


def test_a_finder_that_raises_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "verl":
            raise RuntimeError("no licence")

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert product("verl").problem == "not to be looked up (RuntimeError: no licence)"
    assert not product("sglang").problem


def test_megatrons_own_replay_is_asked_of_its_files_not_of_its_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = megatron(path)
    assert "moe_router_fusion" not in capability("replay on Megatron-core").why
    assert capability("Megatron's own replay").state == "shimmed"
    assert capability("Megatron's own replay").why.startswith("this Megatron has none")
    write(core / "transformer/moe/router_replay.py")
    assert capability("Megatron's own replay").state == "shimmed"  # a file that no config turns on
    monkeypatch.setenv("NPU_REPLAY_DISABLE", "1")
    assert capability("Megatron's own replay").state == "missing"
    monkeypatch.delenv("NPU_REPLAY_DISABLE")
    both = "    moe_enable_routing_replay: bool = False\n    moe_router_fusion: bool = False\n"
    megatron(path, config=both)
    assert capability("Megatron's own replay").state == "native"
    assert "moe_router_fusion" in capability("replay on Megatron-core").why


def test_transformers_without_router_modules_works_only_for_some_and_says_how_to_get_more(path: Path) -> None:
    write(path / "transformers/__init__.py", "__version__ = '4.57.6'")
    modeling = path / "transformers/models/qwen3_moe/modeling_qwen3_moe.py"
    write(modeling, "class Qwen3MoeSparseMoeBlock: ...")
    assert "transformers>=5" in capability("replay on transformers").remedy
    write(modeling, "class Qwen3MoeTopKRouter: ...")
    assert capability("replay on transformers") == Capability(
        "replay on transformers", "works", "router modules are recognised"
    )
