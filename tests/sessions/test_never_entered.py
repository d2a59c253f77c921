"""A block that is never entered does nothing, and says so: `replay(...)` without `with`."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import npu_replay
from npu_replay.errors import ReplayError
from zoo.toys import ToyModel, hooks, recorded, tokens

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("few_objects", "toy_routers")


BLOCKS: dict[str, Callable[[ToyModel], Any]] = {
    "record": npu_replay.record,
    "replay": lambda model: npu_replay.replay(model, recorded(model)),
    "pin_recompute": npu_replay.pin_recompute,
    "observe": npu_replay.observe,
    "follow": npu_replay.follow,
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "observe"])
@pytest.mark.parametrize("figures", ["metrics", "counts"])
def test_the_figures_of_a_block_that_was_never_entered_are_an_error(figures: str, kind: str) -> None:
    model = ToyModel()
    session = BLOCKS[kind](model)
    model(tokens()).sum().backward()
    with pytest.raises(
        ReplayError, match=rf"the {kind} block was never entered\. Expected with \.\.\. as session"
    ):
        getattr(session, figures)()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_that_is_dropped_before_it_was_entered_warns_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ToyModel()
    session = BLOCKS[kind](model)
    model(tokens())
    assert not warnings(caplog)
    del session
    (text,) = warnings(caplog)
    assert text.startswith(f"[npu_replay] {kind}() was called, but its block was never entered")
    assert f"with npu_replay.{kind}(...):" in text


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_open_block_that_nobody_keeps_ends_at_once_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not some time later, when the collector runs."""
    model = ToyModel()
    block = BLOCKS[kind](model)
    gc.collect()
    caplog.clear()
    gc.disable()
    try:
        block.__enter__()
        assert hooks(model)
        del block
        assert not hooks(model)
    finally:
        gc.enable()
    assert [one for one in warnings(caplog) if f"an open {kind}() was dropped" in one]


SCRIPT = """
import logging
import npu_replay
from npu_replay import routers
from zoo.toys import ToyModel, ToyRouters, tokens

routers.register("toy", ToyRouters())
model = ToyModel()
with npu_replay.record(model) as recording:
    model(tokens())
session = npu_replay.replay(model, recording.routes)
model.itself = [model, session]  # a cycle that nobody collects
model(tokens())
"""


@pytest.mark.slow
@pytest.mark.choice(every=3)
@pytest.mark.parametrize("end", ["raise KeyError('theirs')", "", "raise SystemExit(3)"])
def test_one_that_lives_until_the_process_ends_warns_then(end: str) -> None:
    path = [str(TESTS), str(Path(npu_replay.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}\n" + textwrap.dedent(SCRIPT) + end
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == {"": 0, "raise SystemExit(3)": 3}.get(end, 1)
    assert ran.stderr.count("replay() was called, but its block was never entered") == 1
    assert ran.stderr.count("Traceback") == ("KeyError" in end), ran.stderr
