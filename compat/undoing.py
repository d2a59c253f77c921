"""Everything that npu_replay has changed in other modules of this process, undone in one order."""

from __future__ import annotations

import logging
import sys

from npu_replay.compat import import_hook, patching

logger = logging.getLogger(__name__)


def undo_everything() -> None:
    """Undo it, open blocks or none: for `uninstall`, and for a job that goes on without npu_replay.

    What somebody else has replaced since is left to them, with one WARNING that names it.
    """
    import_hook.forget()
    _tell("served_modules", "withdraw")
    left = patching.undo_all()
    _tell("verl_engine", "forsake")
    if left:
        logger.warning(
            "[npu_replay] these were left alone, since somebody else has replaced them: %s",
            ", ".join(patch.where for patch in left),
        )


def _tell(shim: str, function: str) -> None:
    """Call a function of a module of npu_replay.compat; one that isn't imported has nothing to undo."""
    module = sys.modules.get(f"npu_replay.compat.{shim}")
    if module is not None:
        getattr(module, function)()
