"""The environment variables: one reading of all, and an error at import for what can't be used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import jobs
from npu_replay import environment
from npu_replay.errors import ReplayError

SWITCHES: dict[str, tuple[Callable[[], Any], Any]] = {
    environment.DISABLE: (environment.disabled, False),
    environment.AUTOLOAD: (lambda: environment.read(environment.AUTOLOAD), None),
    environment.STRICT: (environment.strict, True),
    environment.VLLM_ASCEND: (lambda: environment.read(environment.VLLM_ASCEND), None),
}
"""How each is read, and what it is where nobody has set it."""
UNUSABLE = {
    environment.DISABLE: ["maybe", "2", "01", "-1", "yes please", "disable", "None"],
    environment.STRICT: ["lenient", "O", "nope"],
    environment.AUTOLOAD: ["auto", "none"],
    environment.EXPERT_BIAS: ["rows"],
    environment.VLLM_ASCEND: ["ascend", "oui"],
    environment.AUX_LOSS: ["both", "1", "off", "live,replayed"],
    environment.MIN_OVERLAP: ["much", "1.01", "-0.1", "nan", "20%", "true"],
    environment.BAD_SAMPLES: ["few", "2", "inf", "1%"],
    environment.METRICS_EVERY: ["often", "-1", "2.5", "1 in 2", "off"],
    environment.DELIVERY: ["redis", "routes", "./routes", "/shared/routes", "true", "ray://head"],
}
USABLE = {
    environment.DISABLE: {"TRUE": True, " no ": False},
    environment.STRICT: {"False": False, "ON": True},
    environment.AUTOLOAD: {"0": False, "on": True},
    environment.EXPERT_BIAS: {"1": True},
    environment.VLLM_ASCEND: {"Yes": True, "oFF": False},
    environment.AUX_LOSS: {"Live": "live", "Replayed ": "replayed"},
    environment.MIN_OVERLAP: {"0": 0, " 0.25": 0.25, "1": 1},
    environment.BAD_SAMPLES: {"0": 0, "1e-3": 1e-3},
    environment.METRICS_EVERY: {"0": 0, " 10 ": 10},
    environment.DELIVERY: {"Ray ": "ray", "False": "", "off": "", "No": "", "0": ""},
}
"""Values, and what they mean."""


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_read_in_any_case_and_with_spaces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is one that nobody has set."""
    read, default = SWITCHES[name]
    for word in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        for value in (word, word.upper(), word.capitalize(), f" {word}\t"):
            monkeypatch.setenv(name, value)
            assert read() is (word in ("1", "true", "yes", "on")), value
    for value in ("", "  "):
        monkeypatch.setenv(name, value)
        assert read() is default
    monkeypatch.delenv(name)
    assert read() is default


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_can_be_used_is_read_and_what_cannot_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, meant in (USABLE[name] | {"": None, " ": None}).items():
        monkeypatch.setenv(name, value)
        environment.check()
        assert environment.read(name) == meant
    for value in UNUSABLE[name]:
        monkeypatch.setenv(name, value)
        with pytest.raises(ReplayError) as caught:
            environment.check()
        assert all(words in str(caught.value) for words in (name, value, "Expected"))


@pytest.mark.parametrize(
    ("name", "is_slip"),
    [
        *((name, True) for name in ("NPU_REPLAY_DISABEL", "NPU_REPLAY_DISABLED", "NPU_REPLAY_METRIC_EVERY")),
        *((name, False) for name in ("NPU_REPLAY_HOME", "NPU_REPLAY_NEEDED")),
    ],
)
def test_a_slip_in_a_name_is_refused_and_other_names_are_left_alone(
    name: str, is_slip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    refused = pytest.raises(ReplayError, match=rf"Expected NPU_REPLAY_\w+, got {name}")
    with refused if is_slip else nullcontext():
        environment.check()


IMPORTED = """
import os
errors = []
for name, value in (("NPU_REPLAY_MIN_OVERLAP", "much"), ("NPU_REPLAY_DISABLED", "1")):
    os.environ[name] = value
    try:
        import npu_replay
    except RuntimeError as error:
        errors.append(f"{type(error).__name__} {error}")
    os.environ.pop(name)
import npu_replay
print(json.dumps([*errors, npu_replay.record.__name__]))
"""


def test_the_import_fails_and_a_second_one_may_not() -> None:
    """In the process whose environment it is, before anything is changed in another library."""
    bad_value, bad_name, after = jobs.printed(IMPORTED)
    assert bad_value.startswith("ReplayError [npu_replay] NPU_REPLAY_MIN_OVERLAP")
    assert bad_name.startswith("ReplayError [npu_replay]")
    assert "NPU_REPLAY_DISABLED" in bad_name
    assert after == "record"
