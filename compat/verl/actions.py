"""What verl's router replay actions open and close: a record or a replay of the models that they mean.

verl sets an action on all routers of the process, runs a schedule, and clears the action. Here the first
opens a session and the last closes it. Which models are meant is said by the engine whose schedule runs;
where verl's functions are called without one, all live models with the flag are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.compat.megatron.parallel_state import config_of, unwrapped
from npu_replay.compat.verl import live_models
from npu_replay.errors import MicroBatchError, ReplayError, RouterError
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.stepwise import StepRecording, StepReplay

if TYPE_CHECKING:
    from npu_replay.compat.verl.engine import Pass

logger = logging.getLogger(__name__)

RECORD, REPLAY, BACKWARD = "record", "replay_forward", "replay_backward"
"""The values of verl's RouterReplayAction, and of Megatron's."""


class Switch:
    """The one that all of verl's functions turn."""

    def __init__(self) -> None:
        self.action = ""
        self.job: Pass | None = None
        self._sessions: list[StepReplay | StepRecording] = []
        self._targets: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._last: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()
        self._off = self._expected = 0

    # Actions

    def set(self, action: str) -> None:
        """Turn to record, to replay, or between a replay's forwards and backwards."""
        if self._off:
            return
        before, self.action = self.action, action
        same_pass = before == action or {before, action} == {REPLAY, BACKWARD}
        if action == BACKWARD or (self._sessions and same_pass):
            return
        # verl turns to replay first and then, in a record, on to that: what saw no forward goes.
        if any(map(_ran, self._sessions)):
            self._close()
        self._abandon()
        if self.job is not None or not self._expected:
            self._open()

    def clear(self) -> None:
        """No action any more. Without an engine this closes what is open, and checks that it was complete."""
        self.action = ""
        self._targets.clear()
        if self.job is None:
            self._close()

    def drop_targets(self) -> None:
        """Forget what was recorded, and routes that were set on routers and not used yet."""
        self._targets.clear()
        self._last.clear()

    @contextmanager
    def off(self) -> Iterator[None]:
        """No action has an effect: a reference pass through the actor's own functions."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """An engine's schedule runs in here: an action that is set before it waits for it."""
        self._expected += 1
        try:
            yield
        except BaseException:
            self.action = ""
            raise
        finally:
            self._expected -= 1

    @contextmanager
    def running(self, job: Pass) -> Iterator[None]:
        """An engine's schedule runs; what is opened meanwhile is its, and closed when it ends."""
        self._abandon()
        outer, self.job = self.job, job
        try:
            try:
                if self.action and not self._off:
                    self._open()
                yield
            except ReplayError as error:
                if not error.shared:
                    logger.error("%s", error)  # before a collective that others may never come to
                    job.settle(self._sessions[0] if self._sessions else None, error)
                raise
            session = self._sessions.pop() if self._sessions else None
            problem = (
                None if session is None else problem_of("end a pass", session.__exit__, None, None, None)
            )
            job.settle(session, problem)
        except BaseException:
            self.action = ""
            raise
        finally:
            self._abandon()
            self.job = outer
            self._targets.clear()

    # Questions

    @property
    def is_off(self) -> bool:
        """Has no action an effect?"""
        return self._off > 0

    def is_(self, action: str) -> bool:
        """Is this the action?"""
        return not self._off and self.action == action

    def replaying(self, model: Any, config: Any, stage: int | None) -> tuple[StepReplay, int]:
        """The open replay, and which of its chunks is meant."""
        return self._open_one(StepReplay, "replay", model, config, stage)

    def recording(self, model: Any, config: Any, stage: int | None) -> tuple[StepRecording, int]:
        """The open record, and which of its chunks is meant."""
        return self._open_one(StepRecording, "record", model, config, stage)

    def _open_one(self, kind: Any, name: str, model: Any, config: Any, stage: int | None) -> tuple[Any, int]:
        sessions = [one for one in self._sessions if isinstance(one, kind)]
        wanted = model[0] if isinstance(model, list | tuple) else model
        for session in sessions:
            for number, chunk in enumerate(session._chunks):
                if wanted is not None and any(one is wanted for one in unwrapped(chunk)):
                    return session, number
        if len(sessions) > 1:
            sessions = [one for one in sessions if config_of(one._chunks) is config]
        if len(sessions) == 1:
            return sessions[0], _stage(sessions[0]._chunks, stage)
        raise MicroBatchError(
            f"no {name} is on for this model" if not sessions else f"several models are in a {name}",
            expected="verl's action before the forward, on one model",
            got=f"action {self.action or None}, {len(sessions)} models with this config",
            cause="a forward step outside the engine's forward_backward_batch, or two models with one config",
        )

    def defer(self, error: ReplayError) -> None:
        """Raise an error when all ranks can leave: at once, unless an engine's schedule runs."""
        if self.job is None or not self._sessions:
            raise error
        for session in self._sessions:
            session.defer(error)

    # Single routers

    def recorded(self, router: nn.Module) -> torch.Tensor | None:
        """The ids of a router's last recorded call, int64 [rows, topk]; None without one. They outlast the
        record where no engine runs it, as in verl."""
        found = self._last.get(router)
        for session in self._sessions:
            for one in session._all_routers():
                if one.module is router and isinstance(session, StepRecording):
                    found = session.last(one)
        return None if found is None else found.long()

    def target(self, router: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Give one router the routes of its next forward; they count when all of its chunk have theirs."""
        self._targets[id(router)] = ids, mask
        for session in self._sessions:
            for chunk, routers in enumerate(session._routers):
                if isinstance(session, StepReplay) and any(one.module is router for one in routers):
                    if all(id(one.module) in self._targets for one in routers):
                        given = [self._targets.pop(id(one.module)) for one in routers]
                        session.give(chunk, _together(given, routers))
                    return
        raise RouterError(
            "this router is in no open replay",
            expected="set_global_router_replay_action(REPLAY_FORWARD) before its target is set",
            got=f"action {self.action or None}",
        )

    # What is open

    def _open(self) -> None:
        record = self.action == RECORD
        self._last.clear()
        if self.job is not None:
            what = "record" if record else "replay"
            self.job.begin(problem_of(what, self._open_for, self.job, record), records=record)
            return
        models = live_models.models()
        if not models:
            raise RouterError(
                "no model in this process asks for a replay",
                expected="enable_routing_replay (or moe_enable_routing_replay) on a built model's config",
                got="no router with it",
                cause="the action was set before the model was built, or the flag is missing in its config",
            )
        try:
            for chunks in models:
                self._sessions.append((StepRecording(chunks) if record else StepReplay(chunks)).__enter__())
        except BaseException:
            self._abandon()
            raise

    def _open_for(self, job: Pass, record: bool) -> None:
        """An engine's session, whose errors wait for the end of its schedule."""
        session: Any = (
            StepRecording(job.chunks, errors_wait=True)
            if record
            else StepReplay(
                job.chunks,
                errors_wait=True,
                live_mismatch=job.compares(),
                min_overlap=job.min_overlap(),
            )
        )
        self._sessions.append(session.__enter__())

    def _abandon(self) -> None:
        for session in self._sessions:
            session.__exit__(ReplayError, None, None)
        self._sessions.clear()

    def _close(self) -> None:
        """Close all that is open. Models that ran nothing were not meant, if another did."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            if isinstance(session, StepRecording):
                found = {one.module: session.last(one) for one in session._all_routers()}
                self._last.update({module: ids for module, ids in found.items() if ids is not None})
        used = list(filter(_ran, sessions)) or sessions[:1]
        for session in sessions:
            if session not in used:
                session.__exit__(ReplayError, None, None)
        for session in used:
            session.__exit__(None, None, None)


switch = Switch()


@contextmanager
def without_adapter(original: Callable[[Any], Any], engine: Any) -> Iterator[Any]:
    """A LoRA actor without its adapter is the reference; verl asks it for log-probs with replay on."""
    with switch.off(), original(engine) as given:
        yield given


def problem_of(what: str, function: Callable[..., object], *arguments: Any) -> ReplayError | None:
    """Why a call failed, whatever it is: the other ranks wait to hear of it. None if it didn't."""
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


def _ran(session: StepReplay | StepRecording) -> bool:
    """Has any chunk seen a forward?"""
    return any(session._timeline.ended)


def _stage(chunks: Sequence[nn.Module], told: int | None) -> int:
    """The virtual stage that is meant.

    verl reads it off the model and takes 0 where it isn't written there. Megatron-core 0.12's schedules say
    it to the parallel state instead, and newer ones don't.
    """
    if len(chunks) == 1:
        return 0
    if all(any(hasattr(one, "vp_stage") for one in unwrapped(chunk)) for chunk in chunks):
        return told or 0
    from megatron.core import parallel_state

    return int(parallel_state.get_virtual_pipeline_model_parallel_rank() or 0)


def _together(
    given: Sequence[tuple[torch.Tensor, torch.Tensor | None]], routers: Sequence[Any]
) -> RoutedExperts:
    """Targets of single routers, [rows, topk] each, as the routes of their chunk."""
    masks = [mask.reshape(-1).bool().cpu() for _, mask in given if mask is not None]
    return RoutedExperts(
        ids=torch.stack([ids.cpu() for ids, _ in given], dim=1),
        layers=[one.label for one in routers],
        num_experts=routers[0].num_experts,
        recorded=torch.stack(masks).all(dim=0) if masks else None,
    )
