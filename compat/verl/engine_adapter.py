"""What a pass asks of an engine or actor, and what is kept of it from one pass to the next.

The class is that of verl's Megatron engines; other engines have a subclass beside what wraps them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from npu_replay.compat.patching.patches import when_undone
from npu_replay.compat.verl.batch_routes import RoutesByKey
from npu_replay.compat.verl.files import Files
from npu_replay.compat.verl.r2_store import R2Store
from npu_replay.compat.verl.r3_store import R3Store
from npu_replay.compat.verl.settings import OFF
from npu_replay.errors import ReplayError


class EngineAdapter:
    """What a pass asks of one engine, which it doesn't keep alive.

    Attributes:
        kind: whose engine it is; what is installed again by itself.
        entry: its method that refuses to run when npu_replay was uninstalled.
        stack: what it runs on, for the line that says that replay is on; Megatron where it is empty.
        acts: its passes set the action themselves, since no code of the framework's does.
        files: of its routes, if they are written or read.
        routes: those that are here, by key, for the passes of a step; `r2` and `r3` put them there.
        updates: passes that trained.
        announced: has it been said that replay is on?
        met: have its ranks met before a first pass?
        microseconds: spent in passes without a backward, whose figures verl has no place for, since the last
            one with.
    """

    kind = "Megatron"
    entry = "forward_backward_batch"
    stack = ""
    acts = False

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.files = Files.of(self.settings)
        self.routes = RoutesByKey()
        self.r2, self.r3 = R2Store(self.routes), R3Store(self.routes)
        self.updates = self.microseconds = 0
        self.announced = self.met = False

    @classmethod
    def of(cls, engine: Any) -> Any:
        """Return the one of an engine; None where its mode is disabled."""
        known = _adapters.get(engine) or cls(engine)
        if known.mode == OFF:
            return None
        return _adapters.setdefault(engine, known)

    @property
    def engine(self) -> Any:
        """The engine, as long as it is alive."""
        return self._engine()

    @property
    def settings(self) -> Any:
        """Its settings of router_replay: mode, record_file, replay_file."""
        return self.engine.engine_config.router_replay

    @property
    def mode(self) -> str:
        """R2, R3 or disabled, as it is told at the time."""
        return self.settings.mode  # type: ignore[no-any-return]

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """The chunks of its model."""
        return self.engine.module  # type: ignore[no-any-return]

    @property
    def model(self) -> Any:
        """Its model's TransformerConfig or RoutedModel."""
        return self.engine.tf_config


def problem_of(what: str, function: Callable[..., object], *arguments: Any) -> ReplayError | None:
    """Return why a call failed, whatever it is: the other ranks wait to hear of it. None if it didn't."""
    try:
        function(*arguments)
    except ReplayError as error:
        return error
    except Exception as error:  # noqa: BLE001  see above
        unknown = ReplayError(
            f"this rank can't {what}",
            where="an engine's pass",
            expected="a model as it was built, and no fault of its machine",
            got=repr(error),
            cause="a model that was changed since, a disk; this error's own cause has the traceback",
        )
        unknown.__cause__ = error
        return unknown
    return None


_adapters: WeakKeyDictionary[Any, EngineAdapter] = WeakKeyDictionary()


def refuse_engines() -> None:
    """Stop engines that were built with npu_replay, which is being uninstalled.

    Their routers lack what verl's patch hangs on them, and they would go on without a replay, unnoticed.
    """
    for engine, adapter in list(_adapters.items()):
        setattr(engine, adapter.entry, _refuse)
        adapter.routes.clear()


when_undone(refuse_engines)


def restore_engines(kind: str = EngineAdapter.kind) -> None:
    """Let engines that were refused go on, built with npu_replay as they are: it is installed again."""
    for engine, adapter in list(_adapters.items()):
        if adapter.kind == kind and vars(engine).get(adapter.entry) is _refuse:
            delattr(engine, adapter.entry)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ReplayError(
        "npu_replay was uninstalled after this engine had replayed with it",
        expected="uninstall() before the engine is built, or NPU_REPLAY_DISABLE=1 from the start",
        got="uninstall() in the middle of a job",
        cause="start the workers anew to go on without npu_replay, or npu_replay.install() to go on with it",
    )
