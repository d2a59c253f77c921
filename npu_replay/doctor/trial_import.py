"""Import something as a job does, npu_replay first, and tell what fails; doctor gives it its own process.

What fails only when it is imported can't be read off a source: a requirement that isn't there, a module that
raises, a function that a fork has renamed and that npu_replay looks for in vain.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from npu_replay.compat.patching import import_hook
from npu_replay.errors import ReplayError


@dataclass(frozen=True)
class Trial:
    """How an import went.

    Attributes:
        problem: the error that an import raised; empty if none did.
        refusal: what npu_replay couldn't change, for which every block is refused; empty if all is well.
    """

    problem: str = ""
    refusal: str = ""

    @property
    def went_wrong(self) -> str:
        """Both, as what a product does; empty if nothing did."""
        return "; ".join(
            f"{what}: {why}"
            for what, why in (("doesn't import", self.problem), ("can't be replayed", self.refusal))
            if why
        )


def run(modules: Iterable[str]) -> Trial:
    """Import these modules into this process, one after the other, up to the first that fails."""
    return Trial(next(filter(None, map(_import, modules)), ""), _refusal())


def _import(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a product may raise anything
        says = str(error).strip()
        return f"{type(error).__name__}: {says.splitlines()[0]}" if says else type(error).__name__
    return ""


def _refusal() -> str:
    os.environ.pop(import_hook.STRICT, None)  # whoever asks is told, and judges
    try:
        import_hook.refuse_failures()
    except ReplayError as error:
        return error.problem
    return ""


if __name__ == "__main__":
    wanted, sys.argv = sys.argv[1:], sys.argv[:1]  # MindSpeed takes what it finds there for its own
    sys.stdout.write("\n" + json.dumps(asdict(run(wanted))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # at once: what a product prints, or how it crashes, at exit is no matter of its import
