"""A plug-in of verl's whose change to verl fails."""

from typing import Any

from npu_replay.compat.patching import import_hook


def _break(module: Any) -> None:
    raise KeyError("gone")


import_hook.when_imported("verl.workers.engine_workers", "a broken shim", _break)
