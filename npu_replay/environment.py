"""The environment variables that a user may set: each is read here and nowhere else.

Spaces around a value and the case of a word make no difference; an empty value is the same as none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, TypeAlias, TypeVar

from npu_replay.errors import ReplayError, share

AUX_LOSS = "NPU_REPLAY_AUX_LOSS"
BAD_SAMPLES = "NPU_REPLAY_BAD_SAMPLES"
DELIVERY = "NPU_REPLAY_DELIVERY"
DISABLE = "NPU_REPLAY_DISABLE"
METRICS_EVERY = "NPU_REPLAY_METRICS_EVERY"
MIN_OVERLAP = "NPU_REPLAY_MIN_OVERLAP"
STRICT = "NPU_REPLAY_STRICT"
VLLM_ASCEND = "NPU_REPLAY_VLLM_ASCEND"
_NAMES = (AUX_LOSS, BAD_SAMPLES, DELIVERY, DISABLE, METRICS_EVERY, MIN_OVERLAP, STRICT, VLLM_ASCEND)

AuxLoss: TypeAlias = Literal["live", "replayed"]

_T = TypeVar("_T")
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def disabled() -> bool:
    """Return whether the user has turned all changes to other modules off."""
    return _switch(DISABLE, default=False)


def strict() -> bool:
    """Return whether a job stops where npu_replay can't do its part; switched off, it goes on without."""
    return _switch(STRICT, default=True)


def captures() -> bool:
    """Return whether npu_replay is asked to capture on vllm-ascend."""
    return _switch(VLLM_ASCEND, default=False)


def aux_loss() -> AuxLoss:
    """Return which experts aux losses count in a replay."""
    return _word(AUX_LOSS, {"live": "live", "replayed": "replayed"}, "live")


def min_overlap() -> float | None:
    """Return the overlap below which an engine's routes are refused; None: as measured."""
    told = _told(MIN_OVERLAP)
    return share(told, MIN_OVERLAP, "experts that were given") if told else None


def bad_samples(default: float) -> float:
    """Return the share of a pass's samples whose routes may be unusable."""
    return share(_told(BAD_SAMPLES) or default, BAD_SAMPLES, "samples")


def metrics_every() -> int:
    """Return on every which update `live_mismatch` is counted; 0: on none."""
    told = _told(METRICS_EVERY) or "10"
    ReplayError.unless(told.isdecimal(), f"{METRICS_EVERY} must be a whole number", "10, for one", told)
    return int(told)


def carrier() -> str:
    """Return what carries routes, so that verl's batches needn't: "ray", or a folder; "" where batches do."""
    told = _told(DELIVERY)
    if os.path.isabs(told):
        return told
    return _word(DELIVERY, {"ray": "ray"} | dict.fromkeys(_OFF, ""), "", "the absolute path of a folder")


def check() -> None:
    """Refuse a variable whose value can't be used, and a name that is a slip of one of these.

    Raises:
        ReplayError: names the variable, what was expected and what came.
    """
    for read in (disabled, strict, captures, aux_loss, min_overlap, metrics_every, carrier):
        read()
    bad_samples(0)
    for name in (name for name in os.environ if name.startswith("NPU_REPLAY_") and name not in _NAMES):
        meant = get_close_matches(name, _NAMES, n=1, cutoff=0.9)
        ReplayError.unless(not meant, "npu_replay reads no such variable", " ".join(meant), name, "a slip")


def _told(name: str) -> str:
    return os.environ.get(name, "").strip()


def _switch(name: str, *, default: bool) -> bool:
    return _word(name, dict.fromkeys(_ON, True) | dict.fromkeys(_OFF, False), default)


def _word(name: str, words: Mapping[str, _T], default: _T, *others: str) -> _T:
    """Return what the variable's word means; others: what else its error says that it may be."""
    told = _told(name)
    if told and told.lower() not in words:
        expected = ", ".join((*words, *others))
        raise ReplayError("this value can't be used", where=name, expected=f"one of {expected}", got=told)
    return words[told.lower()] if told else default
