"""What npu_replay changes in other modules: all of it put in place, or all of it undone."""

from __future__ import annotations

from npu_replay.compat import import_hook
from npu_replay.compat.undoing import undo_everything
from npu_replay.errors import ReplayError
from npu_replay.later import later

_SHIMS = {
    "verl": ("verl", "verl_rollout", "verl_config"),  # first: it takes back what verl has done to Megatron
    "megatron.core": ("config_flags", "router_replay", "moe_functions", "replayed_routers"),
    "sglang": ("sglang_old_path",),
}
"""The modules of npu_replay.compat that change a package. Each is imported, and its `install` called, in this
order, before the package's own code runs."""


def install() -> None:
    """Change what has to be changed in other modules, now or when they are imported.

    `import npu_replay` does this; call it to have all of it back after `uninstall`: engines of verl that it
    had stopped go on, too. Twice is as good as once. With NPU_REPLAY_DISABLE=1 nothing is done.
    """
    for package, shims in _SHIMS.items():
        for shim in shims:
            module = f"npu_replay.compat.{shim}"
            import_hook.before_import(package, module, later(f"{module}:install"))


def uninstall() -> None:
    """Undo everything that npu_replay has changed in other modules of this process. Twice is as good as once.

    Each process of a job has to be told: npu_replay keeps no connection between them. What somebody else has
    replaced since is left to them, with one WARNING that names it. Router kinds stay
    registered: they are npu_replay's own, and change nobody's module.

    Raises:
        ReplayError: a record, replay or pin_recompute block is open. Nothing has been undone then.
    """
    from npu_replay.reporting import open_sessions  # here: it imports most of npu_replay

    blocks = open_sessions()
    if blocks:
        raise ReplayError(
            "uninstall() inside an open block",
            expected="no open record, replay or pin_recompute block",
            got="; ".join(map(str, blocks)),
            cause="it was called from the training step; call it after the block has ended",
        )
    undo_everything()
