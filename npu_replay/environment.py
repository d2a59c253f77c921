"""Read the environment variables that a user may set; all of them are read here only.

The entry points of verl and vLLM read some before npu_replay is imported, in npu_replay_autoload.

Spaces around a value and the case of a word make no difference; an empty value counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from npu_replay.errors import ReplayError, share

AUTOLOAD = "NPU_REPLAY_AUTOLOAD"
AUX_LOSS = "NPU_REPLAY_AUX_LOSS"
BAD_SAMPLES = "NPU_REPLAY_BAD_SAMPLES"
DELIVERY = "NPU_REPLAY_DELIVERY"
DISABLE = "NPU_REPLAY_DISABLE"
EXPERT_BIAS = "NPU_REPLAY_EXPERT_BIAS"
METRICS_EVERY = "NPU_REPLAY_METRICS_EVERY"
MIN_OVERLAP = "NPU_REPLAY_MIN_OVERLAP"
STRICT = "NPU_REPLAY_STRICT"
VLLM_ASCEND = "NPU_REPLAY_VLLM_ASCEND"


def read(name: str, default: Any = None) -> Any:
    """Return the value of a variable, or `default` if it is unset; an error names the variable."""
    text = os.environ.get(name, "").strip()
    return _READINGS[name](text, name) if text else default


def disabled() -> bool:
    return bool(read(DISABLE, False))


def strict() -> bool:
    """Return whether a job stops if npu_replay can't do its part, instead of going on without it."""
    return bool(read(STRICT, True))


def check() -> None:
    """Refuse a variable with an invalid value, and a name that is a misspelling of a known one."""
    for name in _READINGS:
        read(name)
    for name in (name for name in os.environ if name.startswith("NPU_REPLAY_") and name not in _READINGS):
        meant = get_close_matches(name, _READINGS, n=1, cutoff=0.9)
        ReplayError.unless(not meant, "npu_replay reads no such variable", " ".join(meant), name, "a slip")


def _word(text: str, name: str, words: Mapping[str, Any], cause: str = "") -> Any:
    ReplayError.unless(
        text.lower() in words,
        "this value can't be used",
        where=name,
        expected=f"one of {', '.join(words)}",
        got=text,
        cause=cause,
    )
    return words[text.lower()]


def _count(text: str, name: str) -> int:
    ReplayError.unless(text.isdecimal(), f"{name} must be a whole number", "10, for one", text)
    return int(text)


_ON = dict.fromkeys(("1", "true", "yes", "on"), True)
_OFF = dict.fromkeys(("0", "false", "no", "off"), False)
_NO_FOLDER = "a folder: routes in one are a RouteStore; in verl, router_replay.record_file and replay_file"
_READINGS: dict[str, Callable[[str, str], Any]] = {
    AUX_LOSS: partial(_word, words={"live": "live", "replayed": "replayed"}),
    BAD_SAMPLES: partial(share, of="samples"),
    DELIVERY: partial(_word, words={"ray": "ray"} | dict.fromkeys(_OFF, ""), cause=_NO_FOLDER),
    METRICS_EVERY: _count,
    MIN_OVERLAP: partial(share, of="experts that were given"),
    **dict.fromkeys((AUTOLOAD, DISABLE, EXPERT_BIAS, STRICT, VLLM_ASCEND), partial(_word, words=_ON | _OFF)),
}
"""Maps each variable to the function that parses its value."""
