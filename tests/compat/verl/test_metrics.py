"""The line that an operator has to see."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import jobs
from npu_replay.compat.verl.metrics import announce


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[logging.Logger]:
    logger = logging.getLogger("npu_replay.job")
    handlers, level = list(logger.handlers), logger.level
    logger.handlers.clear()
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("logging_of_its_own", "lines"),
    [
        ("pass", ["[npu_replay] one", "[npu_replay] two"]),
        (  # warnings alone are shown
            "import logging; logging.basicConfig(level=logging.WARNING, format='%(name)s %(message)s')",
            ["npu_replay.job [npu_replay] one", "npu_replay.job [npu_replay] two"],
        ),
    ],
)
def test_it_is_seen_once_whatever_logging_a_process_has_set_up(
    logging_of_its_own: str, lines: list[str]
) -> None:
    code = f"""
import io
sys.stderr = io.StringIO()
{logging_of_its_own}
from npu_replay.compat.verl.metrics import announce
announce('one'); announce('two')
print(json.dumps(sys.stderr.getvalue().splitlines()))
"""
    assert jobs.printed(code) == lines


def test_it_goes_the_users_way_where_logging_is_set_up(
    caplog: pytest.LogCaptureFixture, logger_as_it_was: logging.Logger
) -> None:
    with caplog.at_level(logging.INFO):
        announce("one")
    assert [record.getMessage() for record in caplog.records] == ["[npu_replay] one"]
    assert not logger_as_it_was.handlers
