"""Turns all that npu_replay changes in other modules on and off."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial

from npu_replay import environment
from npu_replay.compat.patching import import_hook, patches
from npu_replay.errors import ReplayError
from npu_replay.lazy import lazy

logger = logging.getLogger(__name__)

_SHIMS = {
    # verl first: it undoes what verl has done to Megatron
    "verl": ("verl.install", "verl.fsdp", "verl.agent_loop", "verl.config"),
    "megatron.core": (
        "megatron.config_flags",
        "megatron_backports.router_replay",
        "megatron_backports.moe_utils",
        "megatron_backports.router_init",
    ),
    "sglang": ("sglang.old_path",),
    "roll": ("roll.pipeline", "roll.strategy"),
    "swift": ("swift",),
    **dict.fromkeys(("slime", "vime", "miles"), ("slime.routing_replay",)),
}
"""The modules of npu_replay.compat that change a package. Each is imported, and its `install` called, in this
order, before the package's own code runs.
"""

_ASKING = {
    "verl": ("verl.agent_loop:wait_for_config", "verl.config:install"),
    "sglang": ("sglang.old_path:install",),
}
"""What an entry point installs: functions that read a job's config, and install the rest where it asks."""


def begin() -> None:
    """Check the environment variables and install everything; `import npu_replay` ends with it.

    An entry point of verl imports npu_replay in every job of an image. There only what reads the config is
    installed, and the rest when a config asks for replay. An unusable variable is one ERROR in the log, and
    the first block, or an engine whose config asks for replay, is refused by it.

    Raises:
        ReplayError: a variable has a value that can't be used, or a misspelt name.
    """
    if environment.disabled():
        return
    by_entry_point = getattr(sys.modules.get("npu_replay_autoload"), "loading", False)
    try:
        environment.check()
    except ReplayError as error:
        if not by_entry_point:
            raise
        logger.error("%s. %s", error, import_hook.MEANING)
        import_hook.refuse_with(error)
    if by_entry_point:
        for package, functions in _ASKING.items():
            for function in functions:
                shim = partial(_call, lazy(f"npu_replay.compat.{function}"))
                import_hook.when_imported(package, function, shim, early=True)
    else:
        install()
    how = "an entry point" if by_entry_point else "an import"
    logger.debug(
        "[npu_replay] loaded by %s in process %d; %s=on leaves it out", how, os.getpid(), environment.DISABLE
    )


def install() -> None:
    """Change what has to be changed in other modules, now or when they are imported.

    `import npu_replay` does this; call it after `uninstall` to have all of it again: routers and engines that
    were built with npu_replay go on with it. Repeated calls do nothing. With NPU_REPLAY_DISABLE=on nothing is
    done.

    >>> npu_replay.uninstall()
    >>> npu_replay.report().patches
    ()
    >>> npu_replay.install()
    """
    for package, shims in _SHIMS.items():
        for shim in shims:
            module = f"npu_replay.compat.{shim}"
            import_hook.when_imported(package, module, partial(_call, lazy(f"{module}:install")), early=True)


def _call(shim: Callable[[], object], _: object) -> None:
    shim()


def uninstall() -> None:
    """Turn npu_replay off in this process, and put back what it has changed in other modules.

    Routers and engines that are alive go on as their product's own: what they hold of npu_replay passes each
    call on. Call it in each process of a job: npu_replay keeps no connection between them. Repeated calls do
    nothing. What was replaced by others since is left alone. Router kinds stay registered: they are
    npu_replay's own, and change nobody's module.

    Raises:
        ReplayError: a record, replay or pin_recompute block is open. Nothing has been undone then.
    """
    from npu_replay.sessions.session import open_sessions  # here: it imports most of npu_replay

    got = open_sessions()
    if got:
        raise ReplayError(
            "uninstall() inside an open block",
            expected="no open record, replay or pin_recompute block",
            got="; ".join(map(str, got)),
            cause="it was called from the training step; call it after the block has ended",
        )
    undo_everything()


def undo_everything() -> None:
    """Turn everything off, also while blocks are open, for a job that goes on without npu_replay."""
    patches.turn(False)
    import_hook.forget()
    patches.undo_all()
