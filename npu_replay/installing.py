"""What npu_replay changes in other modules: all of it put in place, or all of it undone."""

from __future__ import annotations

import logging

from npu_replay.compat import (
    config_flags,
    import_hook,
    patching,
    sglang,
    verl,
    verl_config,
    verl_engine,
    verl_rollout,
)
from npu_replay.errors import ReplayError
from npu_replay.reporting import open_sessions

logger = logging.getLogger(__name__)


def install() -> None:
    """Change what has to be changed in other modules, now or when they are imported.

    `import npu_replay` does this; call it to have all of it back after `uninstall`. Twice is as good as
    once.
    With NPU_REPLAY_DISABLE=1 nothing is done.
    """
    for shim in (config_flags, verl, verl_rollout, verl_config, sglang):
        shim.install()


def uninstall() -> None:
    """Undo everything that npu_replay has changed in other modules of this process. Twice is as good as once.

    Each process of a job has to be told: npu_replay keeps no connection between them. What somebody else has
    replaced since is left to them, with one WARNING that names it. Router kinds stay
    registered: they are npu_replay's own, and change nobody's module.

    Raises:
        ReplayError: a record, replay or pin_recompute block is open. Nothing has been undone then.
    """
    blocks = open_sessions()
    if blocks:
        raise ReplayError(
            "uninstall() inside an open block",
            expected="no open record, replay or pin_recompute block",
            got="; ".join(map(str, blocks)),
            cause="it was called from the training step; call it after the block has ended",
        )
    import_hook.forget()
    sglang.uninstall()
    left = patching.undo_all()
    verl_engine.forsake()
    if left:
        logger.warning(
            "[npu_replay] uninstall() left these alone, since somebody else has replaced them: %s",
            ", ".join(patch.where for patch in left),
        )
