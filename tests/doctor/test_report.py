"""npu_replay.report and npu_replay.uninstall."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

import npu_replay
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.probe import Product
from npu_replay.doctor import report as reporting
from npu_replay.doctor.report import Report
from npu_replay.sessions import backward
from toys import ToyModel, ToyRouter, tokens


@pytest.fixture
def model(toy_routers: None) -> ToyModel:
    return ToyModel(ToyRouter(layer=3), ToyRouter(layer=4))


@pytest.fixture(autouse=True)
def installed_again() -> Iterator[None]:
    """As the tests after these expect it."""
    yield
    npu_replay.install()


@pytest.fixture(autouse=True)
def nothing_else_is_patched(installed_again: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test before may have imported Megatron, and its shims are on."""
    monkeypatch.setattr(patching, "_groups", [])


@pytest.fixture
def patches(nothing_else_is_patched: None) -> Iterator[Patches]:
    group = Patches("a test runs")
    yield group
    group.undo()


def states(report: Report) -> dict[str, str]:
    return {capability.name: capability.state for capability in report.capabilities}


def test_report_holds_the_facts_and_changes_nothing() -> None:
    report = npu_replay.report()
    assert report.version == npu_replay.__version__
    assert report.torch.version == torch.__version__
    assert report.torch.recompute_problem == ""
    assert set(report.router_kinds) >= {"megatron-core", "transformers"}
    assert report.open_sessions == ()
    assert report.patches == ()
    assert states(report)["recompute"] == states(report)["CPU"] == "works"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.version = "2"  # type: ignore[misc]


def test_report_reads_as_plain_words(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    patches.set(SimpleNamespace(), "attribute", 1, "because")
    lines = [" ".join(line.split()) for line in str(npu_replay.report()).splitlines()]
    assert lines[0] == "Installed Version Where"
    assert lines[1].startswith(f"npu_replay {npu_replay.__version__} ")
    assert "recompute works each takes the routes of its own forward" in lines
    assert "Open blocks: none" in lines
    assert lines[-4:] == [
        "Changed in other modules: 1",
        "for a test runs:",
        "- attribute of one types.SimpleNamespace",
        "because",
    ]


def test_a_long_name_of_a_change_stays_whole_in_80_columns(
    patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    module = ModuleType("megatron.core.transformer.moe.moe_utils")
    patches.set(module, "compute_routing_scores_for_aux_loss", 1, "one two three four five " * 6)
    lines = str(npu_replay.report()).splitlines()
    assert "  - megatron.core.transformer.moe.moe_utils.compute_routing_scores_for_aux_loss" in lines
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("    ") for line in lines[lines.index("  for a test runs:") + 2 :])


def test_report_lists_an_open_block_once_with_its_layers(model: ToyModel) -> None:
    with npu_replay.record(model):
        model(tokens())
        report = npu_replay.report()
        assert [str(block) for block in report.open_sessions] == ["record on layers 3, 4"]
        assert "record on layers 3, 4" in str(report)
    assert npu_replay.report().open_sessions == ()


def test_a_torch_that_does_not_tell_recomputes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "probe", lambda: "a name is gone")
    report = npu_replay.report()
    assert report.torch.recompute_problem == "a name is gone"
    found = next(c for c in report.capabilities if c.name == "recompute")
    assert found.state == "missing"
    assert "a name is gone" in found.why
    assert found.remedy


@pytest.mark.parametrize(
    ("accelerator", "torch_npu", "cuda", "npu"),
    [
        ("", Product("torch_npu", False), "missing", "missing"),
        ("cuda", Product("torch_npu", False), "works", "missing"),
        ("npu", Product("torch_npu", True, "2.7.1"), "missing", "works"),
        ("", Product("torch_npu", True, "2.7.1"), "missing", "missing"),  # never imported, so not known
        ("", Product("torch_npu", True, "2.7.1", "", "half installed"), "missing", "broken"),
    ],
)
def test_devices_are_told_without_importing_torch_npu(
    accelerator: str, torch_npu: Product, cuda: str, npu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch_npu": torch_npu, "megatron-core": Product("megatron-core", True)}
    products = tuple(there.get(name, Product(name, False)) for name in reporting.probe._KNOWN)
    monkeypatch.setattr(reporting.probe, "products", lambda: products)
    monkeypatch.setattr(reporting.torch_npu, "accelerator", lambda: (accelerator, 1))
    found = states(npu_replay.report())
    assert (found["CUDA"], found["NPU"]) == (cuda, npu)
    assert ("Megatron-core on the CPU" in found) == (accelerator != "cuda")


def test_uninstall_undoes_every_patch_and_may_be_asked_again(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    owner = SimpleNamespace(value=1)
    patches.set(owner, "value", 2, "because")
    patches.set(owner, "new", 2, "because")
    npu_replay.uninstall()
    npu_replay.uninstall()
    assert vars(owner) == {"value": 1}
    assert npu_replay.report().patches == ()
    assert caplog.records == []


def test_uninstall_warns_once_of_what_somebody_else_has_replaced(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    owner = SimpleNamespace(value=1, other=1)
    patches.set(owner, "value", 2, "because")
    patches.set(owner, "other", 2, "because")
    owner.value = 3
    npu_replay.uninstall()
    npu_replay.uninstall()
    assert vars(owner) == {"value": 3, "other": 1}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "value of one types.SimpleNamespace" in record.getMessage()
    assert "other" not in record.getMessage().replace("others", "")


def test_uninstall_inside_a_block_is_refused_before_anything_is_undone(
    model: ToyModel, patches: Patches
) -> None:
    owner = SimpleNamespace(value=1)
    patches.set(owner, "value", 2, "because")
    with npu_replay.record(model):
        model(tokens())
        with pytest.raises(npu_replay.ReplayError, match="got record on layers 3, 4"):
            npu_replay.uninstall()
        assert owner.value == 2
    npu_replay.uninstall()
    assert owner.value == 1


def test_uninstall_inside_lend_takes_the_loan_back() -> None:
    with npu_replay.compat.cpu.lend():
        npu_replay.uninstall()
        assert patching.applied() == []
    assert patching.applied() == []
