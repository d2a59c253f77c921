"""Gives a pass what it needs of an engine, and keeps what passes share. The base is verl's Megatron one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from npu_replay.compat.verl.batch_routes import R2Store, RoutesByKey
from npu_replay.compat.verl.config import OFF, ReplaySettings
from npu_replay.compat.verl.files import Files
from npu_replay.compat.verl.r3_store import R3Store
from npu_replay.errors import ReplayError
from npu_replay.parallel.rank_failures import agreed
from npu_replay.parallel.row_gather import CEILING


class EngineAdapter:
    """Gives a pass what it needs of one engine, without keeping the engine alive.

    Attributes:
        stack: what the engine runs on, for the line that says that replay is on; Megatron if empty.
        acts: whether its passes set the action themselves, since the framework doesn't.
        has_flag: whether its batches are TensorDicts, with verl's flag for what is recorded or replayed.
        routes: the routes on this rank by key, for the passes of a step; filled by `r2` and `r3`.
        updates: how many passes have trained.
        announced: whether the line that replay is on was logged.
        met: whether its ranks have met before a first pass.
        ceiling: the tolerated share of bad samples, from the environment when the ranks met.
        microseconds: spent in passes without a backward since the last one with: verl has no place for them.
    """

    stack = ""
    acts = False
    has_flag = True

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.files = Files.of(self.settings)
        self.routes = RoutesByKey()
        self.r2, self.r3 = R2Store(self.routes), R3Store(self.routes)
        self.updates = self.microseconds = 0
        self.announced = self.met = False
        self.ceiling: float = CEILING

    @classmethod
    def of(cls, engine: Any) -> Any:
        """Return the adapter of an engine; None where its mode is disabled."""
        known = _adapters.get(engine) or cls(engine)
        if known.mode == OFF:
            return None
        return _adapters.setdefault(engine, known)

    @property
    def engine(self) -> Any:
        """Return the engine; None when it is garbage."""
        return self._engine()

    @property
    def section(self) -> Any:
        """Return the section router_replay of the engine's config."""
        return self.engine.engine_config.router_replay

    @property
    def settings(self) -> ReplaySettings:
        return ReplaySettings.of(self.section)

    @property
    def mode(self) -> str:
        """Return R2, R3 or disabled, as configured now."""
        return self.settings.mode

    @property
    def from_rollout(self) -> bool:
        """Return whether routes come from the rollout engine (R3), and aren't recorded here (R2)."""
        return self.mode == "R3"

    @property
    def is_critic(self) -> bool:
        """Return whether the engine has a value model, whose batches verl never marks."""
        return any(kind.__name__.endswith("EngineWithValueHead") for kind in type(self.engine).__mro__)

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self.engine.module  # type: ignore[no-any-return]

    @property
    def pads(self) -> bool:
        """Return whether verl pads the sequences of a micro-batch to one length, instead of packing them."""
        return getattr(self.engine.engine_config, "use_remove_padding", True) is False

    @property
    def pads_to_mini_batch(self) -> bool:
        """Return whether that length is the longest of the mini-batch, and not of the micro-batch."""
        return bool(getattr(self.engine.engine_config, "pad_bshd_to_minibatch_max", False))

    @property
    def model(self) -> Any:
        """Return the model's TransformerConfig or RoutedModel."""
        return self.engine.tf_config


class LegacyActorAdapter(EngineAdapter):
    """Adapts verl 0.7's own MegatronPPOActor, whose workers set the action before its pass."""

    has_flag = False

    @property
    def section(self) -> Any:
        return self.engine.config.router_replay

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self.engine.actor_module  # type: ignore[no-any-return]

    @property
    def pads(self) -> bool:
        return False  # refused by the check of the config


class Problem:
    """Catches any exception of its block as `error`, since the other ranks wait to hear of it.

    with Problem("have its routes here") as problem:
        ...
    if problem.error is not None: ...
    """

    error: ReplayError | None = None

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> Problem:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, ReplayError):
            self.error = error
        elif isinstance(error, Exception):
            self.error = ReplayError(
                f"this rank can't {self._what}",
                where="an engine's pass",
                expected="a model as it was built, and no fault of its machine",
                got=repr(error),
                cause="a model that was changed since, a disk; this error's own cause has the traceback",
            )
            self.error.__cause__ = error
        return isinstance(error, Exception)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that all ranks run, and raise on all of them where one fails."""
    with Problem(what) as problem:
        yield
    agreed(problem.error, {})


_adapters: WeakKeyDictionary[Any, EngineAdapter] = WeakKeyDictionary()
