"""Loads npu_replay where an entry point asks for it, and nothing where a variable turns that off.

verl and vLLM load the entry points of every installed distribution in each of their processes. These modules
need the standard library alone, so a job that leaves npu_replay out pays for nothing else of it.

    NPU_REPLAY_DISABLE=on      the entry points do nothing, as if npu_replay weren't installed
    NPU_REPLAY_AUTOLOAD=off    the same; `import npu_replay` by the job's own code works as ever
"""

from __future__ import annotations

import logging
import os

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
"""The words of a switch, which `npu_replay.environment` reads alike."""

logger = logging.getLogger(__name__)

loading = False
"""Whether an entry point imports npu_replay now: it then notes an unusable variable, and doesn't raise."""


def wanted() -> bool:
    """Return whether an entry point may load npu_replay in this process."""
    return word("NPU_REPLAY_DISABLE") not in ON and word("NPU_REPLAY_AUTOLOAD") not in OFF


def load(product: str) -> None:
    """Import npu_replay for an entry point of `product`, if it may; a failure is one ERROR in the log.

    The job goes on, since most jobs don't ask for replay. One that asks is refused when its workers are
    built, unless NPU_REPLAY_STRICT=off has it go on without.
    """
    global loading
    if not wanted():
        return
    loading = True
    try:
        import npu_replay  # noqa: F401
    except Exception as error:  # noqa: BLE001  a job that doesn't ask for replay mustn't end by it
        cause = f"{type(error).__name__}: {error}"
        words = (
            "[npu_replay] the entry point of %s can't load npu_replay: %s. Jobs without replay go on as if "
            "it weren't installed. A job that asks for replay is refused when its engine is built. "
            "NPU_REPLAY_AUTOLOAD=off leaves npu_replay out"
        )
        logger.error(words, product, cause)
        if word("NPU_REPLAY_STRICT") not in OFF:
            from npu_replay_autoload import refusal

            refusal.refuse(cause)
    finally:
        loading = False


def word(name: str) -> str:
    """Return the value of a variable, as a switch is read; empty where it is unset."""
    return os.environ.get(name, "").strip().lower()
