"""Passes routes through ROLL: into its workers' config, and R2's from the first pass to the update.

ROLL's checks allow no replay on fsdp2, and its workers drop what a first pass returns beside log-probs. So
the worker's answer gets the routes, and the driver's cluster puts them into the batch that it sent. One
import in the driver is enough: a method of the worker's class and the class of a mode are npu_replay's, and
are imported wherever a worker's class and config go.

Asks:     nothing; a name that lacks is an error when its module is imported.
Changes:  WorkerConfig's check, `compute_log_probs` of workers and clusters, `DataProto.materialize_concat`.
Undone:   by `npu_replay.uninstall()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from npu_replay.compat import engines
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.roll import strategy
from npu_replay.compat.verl.config import OFF
from npu_replay.compat.verl.files import ROUTES

CONFIG = "roll.configs.worker_config"
WORKER = "roll.pipeline.base_worker"
CLUSTER = "roll.distributed.executor.cluster"
PROTOCOL = "roll.distributed.scheduler.protocol"
_PASS = "compute_log_probs"
_WHAT = "the way of routes through ROLL"
_patches = Patches(_WHAT)


class Mode(str):
    """Names a mode of router replay; unpickling it imports npu_replay, which a worker's process needs."""

    __slots__ = ()


def _has_npu_replay(worker: Any) -> bool:
    """Return True: a process that loads a worker's class, to which this belongs, has imported npu_replay.

    Ray binds the methods of an actor when it loads its class, before a config is unpickled.
    """
    return True


class _Answers(list[Any]):
    """Holds the pending answer of a cluster, and the batch that its workers were sent."""

    batch: Any = None


def install() -> None:
    for module in (CONFIG, WORKER, PROTOCOL, CLUSTER):
        import_hook.when_imported(module, f"{_WHAT} ({module})", _wrap)


def _wrap(module: Any) -> None:
    name = module.__name__
    into_batch = "R2: routes come into the batch"
    if name == CONFIG:
        why = "R2 and R3 are fine with fsdp2_train; the engine of R3 is checked"
        _patches.wrap(module.WorkerConfig, "__post_init__", _checked, why)
    elif name == WORKER:
        _patches.wrap(module.ActorWorker, _PASS, _answered, "R2: routes go with the log-probs")
        # Ray sends the methods in the order of their names, and those behind this one find npu_replay.
        _patches.set(module.ActorWorker, "_has_npu_replay", _has_npu_replay, "imports npu_replay there")
    elif name == CLUSTER:
        _patches.wrap(module, "func_generator", _bound, into_batch)
    else:
        original = module.DataProto.materialize_concat
        ours = staticmethod(functools.wraps(original)(functools.partial(_fetched, original)))
        _patches.set(module.DataProto, "materialize_concat", ours, into_batch)


def _checked(original: Callable[..., Any], self: Any) -> None:
    """Run ROLL's check without the mode: it raises for R2, and warns for R3, whatever the strategy."""
    if self.router_replay.mode == "R3":
        engines.check("ROLL", self)
    mode = strategy.mode_of(self)
    if mode == OFF:
        return original(self)  # type: ignore[no-any-return]
    asked = self.router_replay
    self.router_replay = SimpleNamespace(mode="disable")
    try:
        original(self)
    finally:
        self.router_replay = asked
    asked.mode = Mode(mode)


def _answered(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(self, *args, **kwargs)
    routes = strategy.recorded(self.strategy)
    if routes is not None and self.rank_info.cp_rank == 0:  # ROLL drops the answers of the others
        output.batch[ROUTES] = routes
    return output


def _bound(original: Callable[..., Any], cluster: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return a cluster's method, which puts the routes of its answers into the batch."""
    ask = original(cluster, method, *args, **kwargs)
    if method != _PASS or strategy.mode_of(cluster.worker_config) != "R2":
        return ask

    @functools.wraps(ask)
    def asked(batch: Any, *more: Any, **named: Any) -> Any:
        answer = ask(batch, *more, **named)
        if not isinstance(answer, list):
            return _carried(answer, batch)
        answers = _Answers(answer)
        answers.batch = batch
        return answers

    return asked


def _fetched(original: Callable[..., Any], data_refs: Any, **kwargs: Any) -> Any:
    answer = original(data_refs, **kwargs)
    return _carried(answer, data_refs.batch) if isinstance(data_refs, _Answers) else answer


def _carried(answer: Any, batch: Any) -> Any:
    """Return the answer, and move its routes into the batch. A LoRA actor's reference pass has none."""
    routes = answer.batch.pop(ROUTES, None)
    if routes is not None:
        batch.batch[ROUTES] = routes
    return answer
