"""docs/errors.md: its classes are those of the code, and its example is what a user reads."""

from __future__ import annotations

import re
import shutil
import traceback
from pathlib import Path

import pytest
import torch

import npu_replay
from npu_replay import ReplayError, errors
from npu_replay.compat.megatron_backports import router_replay
from zoo.toys import HIDDEN, ToyModel

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = {
    name
    for line in TEXT.splitlines()
    if line.startswith("| ")
    for name in re.findall(r"`(\w+)`", line.split("|")[3])
} - {"IndexError", "ValueError"}


def test_every_class_is_there_and_none_is_missing() -> None:
    of_router_replay = {"NoTarget", "AnotherNumber"}
    public = {
        name
        for name in npu_replay.__all__
        if isinstance(one := getattr(npu_replay, name), type) and issubclass(one, ReplayError)
    }
    assert public | of_router_replay == CLASSES
    assert all(issubclass(getattr(router_replay, name), ReplayError) for name in of_router_replay)


@pytest.mark.usefixtures("toy_routers")
def test_the_example_is_what_a_user_reads() -> None:
    model = ToyModel()
    with torch.no_grad(), npu_replay.record(model) as recording:
        for tokens in (5, 10):
            model(torch.randn(tokens, HIDDEN))
    with pytest.raises(ReplayError) as raised, npu_replay.replay(model, recording.routes):
        model(torch.randn(5, HIDDEN))
        model(torch.randn(7, HIDDEN))
    example = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)[0]
    assert " ".join(example.split()) == " ".join(str(raised.value).split())


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 knows no notes")
def test_a_traceback_ends_with_the_page_of_cures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lies: beside the package in the source, inside it as a wheel has it (test_wheel.py)."""

    def last_lines(error: Exception) -> list[str]:
        errors.cures.cache_clear()
        return "".join(traceback.format_exception_only(error)).splitlines()[1:]

    page = ROOT / "docs" / "troubleshooting.md"
    chinese = ", and in Chinese zh/troubleshooting.md beside it"
    assert last_lines(ReplayError("no routes").at("layer 3")) == [f"Symptoms and cures: {page}{chinese}"]
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "errors.py"))
    (missing,) = last_lines(ReplayError("no routes"))
    assert missing.endswith(f"docs/troubleshooting.md in npu_replay's source{chinese}")
    (tmp_path / "docs").mkdir()
    copy = shutil.copy(page, tmp_path / "docs")
    assert last_lines(ReplayError("no routes")) == [f"Symptoms and cures: {copy}{chinese}"]
    errors.cures.cache_clear()
