"""Make npu_replay.compat importable in a clone, where compat/ lies beside this package.

A wheel has it inside. The clone only has to be on the path, as Megatron-LM's and MindSpeed's are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_NAME = "npu_replay.compat"
_PACKAGE = Path(__file__).parent


def _look(folder: Path) -> ModuleSpec | None:
    """Return the spec of the package in `folder`, also in a zip; a folder without __init__.py is ignored."""
    spec = PathFinder.find_spec(_NAME, [str(folder)])
    return spec if spec is not None and spec.origin is not None else None


class _Beside:
    """Finds this one package; on sys.meta_path, so that find_spec and reload work."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        if (spec := _look(_PACKAGE.parent)) is not None:
            return spec
        raise ImportError(
            f"npu_replay in {_PACKAGE} lacks its other half: copy the clone's compat/ too, to "
            f"{_PACKAGE.parent / 'compat'}, or install it: pip install --no-deps CLONE"
        )


# At the front: an editable install of another clone would find that clone's compat.
if _look(_PACKAGE) is None:
    sys.meta_path.insert(0, _Beside())
