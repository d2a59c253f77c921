"""The environment variables: one reading of all, and an error at import for what can't be used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

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
    environment.DISABLE: ["TRUE", " no "],
    environment.STRICT: ["False", "ON"],
    environment.AUTOLOAD: ["0", "on"],
    environment.EXPERT_BIAS: ["1"],
    environment.VLLM_ASCEND: ["Yes", "oFF"],
    environment.AUX_LOSS: ["Live", " replayed "],
    environment.MIN_OVERLAP: ["0", " 0.2", "1"],
    environment.BAD_SAMPLES: ["0", "1e-3"],
    environment.METRICS_EVERY: ["0", " 10 "],
    environment.DELIVERY: ["Ray", "False", "0"],
}


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
def test_what_can_be_used_passes_and_what_cannot_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (*USABLE[name], "", " "):
        monkeypatch.setenv(name, value)
        environment.check()
    for value in UNUSABLE[name]:
        monkeypatch.setenv(name, value)
        with pytest.raises(ReplayError) as caught:
            environment.check()
        assert all(words in str(caught.value) for words in (name, value, "Expected"))


def test_what_is_read_is_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.read(environment.BAD_SAMPLES, 0.01) == 0.01
    for name, value, meant in (
        (environment.AUX_LOSS, "Replayed ", "replayed"),
        (environment.MIN_OVERLAP, " 0.25", 0.25),
        (environment.METRICS_EVERY, " 3", 3),
        (environment.DELIVERY, "Ray ", "ray"),
        *((environment.DELIVERY, off, "") for off in ("off", "No", "0")),
    ):
        monkeypatch.setenv(name, value)
        assert environment.read(name) == meant


@pytest.mark.parametrize("slip", ["NPU_REPLAY_DISABEL", "NPU_REPLAY_DISABLED", "NPU_REPLAY_METRIC_EVERY"])
def test_a_slip_in_a_name_is_told(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(slip, "1")
    with pytest.raises(ReplayError, match=rf"Expected NPU_REPLAY_\w+, got {slip}"):
        environment.check()


@pytest.mark.parametrize("other", ["NPU_REPLAY_HOME", "NPU_REPLAY_NEEDED"])
def test_other_names_are_left_alone(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(other, "1")
    environment.check()


IMPORTED = """
import os
os.environ[{name!r}] = {value!r}
try:
    import npu_replay
except RuntimeError as error:
    print(type(error).__name__, error)
os.environ.pop({name!r})
import npu_replay
print(npu_replay.record.__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [(environment.MIN_OVERLAP, "much"), ("NPU_REPLAY_DISABLED", "1")])
def test_the_import_fails_and_a_second_one_may_not(name: str, value: str) -> None:
    """In the process whose environment it is, before anything is changed in another library."""
    command = [sys.executable, "-c", IMPORTED.format(name=name, value=value)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    said, after = done.stdout.splitlines()
    assert said.startswith("ReplayError [npu_replay]")
    assert name in said
    assert after == "record"
