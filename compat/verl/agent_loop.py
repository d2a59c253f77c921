"""Keeps, cuts and passes on routes in verl's agent loops, from the engine's output to the batch.

Row i of verl's `routed_experts` is token i of prompt and response, in all layers. A row without a route is
all zeros, which no real row is from a top-k of 2 on; with a top-k of 1 it can't be told from expert 0 in
every layer. An engine has no row for the token that it sampled last; the next turn has.

docs/dev/verl.md says what verl's releases get wrong without this.

Asks:     when verl's modules are imported, for a worker with the methods that it wraps, and for the clients.
Changes:  `generate` of the clients; `_run_agent_loop` and `_postprocess` of the worker, and of its instances
          `_agent_loop_postprocess`, where the rollout returns routes; `_compute_ref_log_prob` of the trainer.
Undone:   by `npu_replay.uninstall()`, on instances too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from npu_replay import environment
from npu_replay.compat.engines import setting
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.install import install as install_everything
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl.batch_routes import COLUMN, refused_rows
from npu_replay.compat.verl.config import FLAG, ROOT
from npu_replay.compat.verl.files import ROUTES
from npu_replay.compat.verl.r3_store import Putter, queues
from npu_replay.compat.verl.rollout_checks import RolloutChecks, warn_seldom
from npu_replay.errors import ReplayError
from npu_replay.rollout.turns import Rows
from npu_replay.routes.checks import Array, is_ids
from npu_replay.routes.routed_experts import narrow_array_dtype

logger = logging.getLogger(__name__)

AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
CLIENTS = {
    AGENT_LOOP: ("AsyncLLMServerManager",),
    "verl.workers.rollout.llm_server": ("LLMServerClient", "FullyAsyncLLMServerClient"),
    "verl.experimental.fully_async_policy.fully_async_rollouter": ("FullyAsyncLLMServerClient",),
}
"""The classes that ask the engine, by the module where a release may have them."""
TRAINER = "verl.trainer.ppo.ray_trainer"

_WHAT = "routes from verl's rollout"
_KEEP = "keeps each token's row of the turn that sampled it, and resumes without doubling or shifting"
_CORRECT = "gives every sample one row a token, cut with its response"
_FILL = "one sample without routes doesn't take those of its batch"
_OF_WORKER = ("_run_agent_loop", "_agent_loop_postprocess", "_postprocess")
_WIDEST = np.iinfo(np.int16).max


def install() -> None:
    """Wrap verl's agent loops and its trainer, now or when their modules are imported."""
    for module in (TRAINER, *CLIENTS):
        import_hook.when_imported(module, f"{_WHAT} ({module})", _wrap)


def wait_for_config() -> None:
    """Wrap the trainer, and the constructor of the agent loops' worker, which installs the rest if asked."""

    def guard(module: Any) -> None:
        for kind in _workers_of(module):
            _patches.wrap(kind, "__init__", _made, "reads whether the config asks for routes")

    import_hook.when_imported(TRAINER, f"{_WHAT} ({TRAINER})", _wrap)
    import_hook.when_imported(AGENT_LOOP, f"the config of verl's rollout ({AGENT_LOOP})", guard)


def _made(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    if setting(config, ROOT, "rollout", FLAG):
        install_everything()
    original(self, config, *args, **kwargs)


def _workers_of(module: Any) -> list[type]:
    candidates: list[Any] = [
        getattr(module, name, None) for name in ("AgentLoopWorkerBase", "AgentLoopWorker")
    ]
    return [kind for kind in candidates if isinstance(kind, type) and vars(kind).keys() >= set(_OF_WORKER)]


def _wrap(module: Any) -> None:
    if module.__name__ == TRAINER:
        if hasattr(module.RayPPOTrainer, "_compute_ref_log_prob"):  # 0.7.1 on
            why = "a reference is never replayed, and a dispatch carries all of a batch to every rank"
            _patches.wrap(module.RayPPOTrainer, "_compute_ref_log_prob", _without_routes, why)
        return
    for name in CLIENTS[module.__name__]:
        kind = getattr(module, name, None)
        if kind is not None and "generate" in vars(kind):
            _patches.wrap(kind, "generate", _generate, _KEEP)
    if module.__name__ != AGENT_LOOP:
        return
    workers = _workers_of(module)
    ReplayError.unless(
        bool(workers),
        "verl's agent loop worker isn't there",
        where=module.__name__,
        expected=f"AgentLoopWorker or AgentLoopWorkerBase, with {', '.join(_OF_WORKER)}",
        got=", ".join(name for name in vars(module) if "Worker" in name) or "no worker",
    )
    for kind in workers:
        _patches.wrap(kind, "_run_agent_loop", _run_agent_loop, _KEEP)
        _patches.wrap(kind, "_postprocess", _postprocess, _FILL)


def _without_routes(original: Any, self: Any, batch: Any) -> Any:
    """Send the reference a batch without routes, unless it is the actor without its adapter."""
    # With the actor as reference 0.7 needs the routes. Trainers over TransferQueue send keys alone, and their
    # workers fetch every field.
    names, columns = (set(part.keys()) for part in (batch.batch, batch.non_tensor_batch))
    if ROUTES not in names or getattr(self, "ref_in_actor", False):
        return original(self, batch)
    return original(self, batch.select(names - {ROUTES}, columns - {COLUMN}))


class Turns:
    """Holds what an engine ran for one sample, turn by turn: the tokens, and their routes.

    As in `Rollout`, a row is taken from the turn that sampled from it; it stays missing if that turn had no
    routes. Here the model may be unknown, and turns may share only their beginning. `job` is None for a call
    outside any, and `step` if nobody trains on the sample.
    """

    def __init__(self, job: _Job | None = None, step: int | None = None) -> None:
        self.job = job
        self.step = step
        self.is_refused = False  # the trainer is to refuse the sample
        self._ran: list[tuple[Array, Rows]] = []
        """Tokens and their rows; a turn that continues the one before is merged into it."""

    def add(self, prompt: Array, sampled: Array, routes: Any, *, aborted: bool) -> None:
        """Add one turn: what the engine was given and what it returned; without the latter it is ignored.

        Args:
            routes: [tokens - 1, layers, topk] of both, or None.
            aborted: it was stopped from outside, and may have fewer rows.
        """
        if not len(sampled):
            return
        job = self.job
        if routes is None and job is not None and not aborted and environment.strict():
            raise ReplayError(
                "enable_rollout_routing_replay is on, but the rollout engine returned no routes",
                where="rollout",
                expected="routed_experts in the output of every turn that wasn't aborted",
                got=None,
                cause="an engine that can't capture them (vLLM or vllm-ascend below 0.18, a model "
                "without experts); turn the option off, or take R2",
            )
        tokens = np.concatenate([prompt, sampled])
        ids = None if routes is None else _as_array(routes)
        if ids is not None and len(ids) < (len(prompt) if aborted else len(tokens) - 1):
            # Rows begin at the first token. If there are fewer, nothing tells which tokens they belong to.
            words = (
                "%d turns so far came with too few routes and go without: expected %d rows, got %d. Usual "
                "cause: an engine that returns the rows of the prompt elsewhere (vllm 0.21), or loses some"
            )
            warn_seldom(words, len(tokens) - 1, len(ids))
            ids = None
        if ids is not None and job is not None and job.checks is not None:
            ids = job.checks.admitted(ids, tokens, ended=not aborted)
        rows = Rows.empty(len(tokens), (0, 0), np.uint8) if ids is None else self._rows_of(ids, len(tokens))
        rows.sampled_from[max(len(prompt) - 1, 0) : -1] = True  # the last token has not run yet
        if self._ran:
            before, known = self._ran[-1]
            if _common(before, tokens) == len(before) and known.ids.shape[1:] == rows.ids.shape[1:]:
                self._ran.pop()
                known.make_room(len(tokens))
                known.take(rows)
                rows = known
        self._ran.append((tokens, rows))

    def _rows_of(self, ids: Array, tokens: int) -> Rows:
        ids = _narrow(ids[: tokens - 1])
        rows = Rows.empty(tokens, ids.shape[1:], ids.dtype)
        rows.recorded[: len(ids)] = ids.any(axis=(1, 2)) & (ids != -1).any(axis=(1, 2))  # one -1 stays
        rows.ids[rows.recorded] = ids[rows.recorded[: len(ids)]]
        return rows

    def routes_of(self, tokens: Array) -> tuple[Array | None, int]:
        """Return a sequence's rows, [tokens, layers, topk] or None, and how many tokens the turns have."""
        shared = [(_common(ran, tokens), rows) for ran, rows in self._ran]
        seen = max((common for common, _ in shared), default=0)
        like = next((rows.ids for common, rows in shared if common and rows.ids.shape[1]), None)
        if like is None:
            return None, seen
        # Rows without a route stay zeros.
        rows_so_far = Rows.empty(len(tokens), like.shape[1:], like.dtype)
        for common, rows in shared:
            rows_so_far.take(rows.first(common))
        return rows_so_far.ids, seen


class _Job:
    """Holds what a worker of agent loops was told.

    Attributes:
        client: asks the engine for the policy; turns of a teacher or a judge go through other clients.
        wanted: whether the rollout was told to return routes.
        checks: checks what the engine returns; None where the model is unknown.
        putter: puts routes away, so that the batch has references; None where the batch carries ids.
        like: [0, layers, topk], of the routes so far, for samples that have none of their own.
        queues: samples go to a queue, and verl logs an error of an agent loop and trains without the sample.
    """

    def __init__(self, worker: Any) -> None:
        config = getattr(worker, "config", None)
        rollout = getattr(worker, "rollout_config", None) or setting(config, ROOT, "rollout")
        self.client = getattr(worker, "llm_client", None) or getattr(worker, "server_manager", None)
        self.wanted = bool(setting(rollout, FLAG))
        self.checks: RolloutChecks | None = None
        self.putter: Putter | None = None
        if self.wanted:
            self.checks = RolloutChecks.of(worker, str(setting(rollout, "name")))
            self.putter = Putter.of(worker, None if self.checks is None else self.checks.model)
        self.like: Array | None = None
        self.queues = queues(worker)

    def refuse(self, turns: Turns, error: ReplayError, routes: Any = None) -> None:
        """Raise the error of a sample; where a queue would lose it, log it and let the trainer raise one."""
        if self.like is None and is_ids(routes):
            self.like = routes[:0].astype(np.uint8 if routes.dtype == np.uint8 else np.int16)
        if self.like is None and self.checks is not None:
            model = self.checks.model
            self.like = np.empty((0, model.num_layers, model.topk), narrow_array_dtype(model.num_experts))
        if not self.queues or self.like is None:
            raise error
        if not turns.is_refused:
            logger.error("%s", error)
        turns.is_refused = True

    def routes_of(self, output: Any, turns: Turns) -> Array | None:
        """Return an output's rows, [tokens, layers, topk], writable, uint8 or int16."""
        tokens = _ids([*output.prompt_ids, *output.response_ids])
        if turns.is_refused and self.like is not None:
            return refused_rows(len(tokens), self.like)
        own = output.routed_experts
        rows, seen = turns.routes_of(tokens)
        # The loop asked the engine by a way of its own, which the turns haven't seen: its own rows are used.
        if own is not None and seen < min(len(own), len(tokens)):
            taken = _narrow(_as_array(own)[: len(tokens)])
            rows = np.zeros((len(tokens), *taken.shape[1:]), taken.dtype)
            rows[: len(taken)] = taken
        if rows is not None:
            self.like = rows[:0].copy()
        elif self.like is not None:
            rows = np.zeros((len(tokens), *self.like.shape[1:]), self.like.dtype)
        return rows


# A worker runs its samples as tasks of one event loop, so each task has its own context.
_jobs: WeakKeyDictionary[Any, _Job] = WeakKeyDictionary()
_sample: ContextVar[Turns | None] = ContextVar("npu_replay_sample", default=None)
_running: ContextVar[tuple[Any, list[tuple[Array, Any]]] | None] = ContextVar("npu_replay_call", default=None)
"""The client whose `generate` is running; the prompts and outputs of the calls that it has made of itself."""


async def _generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `generate`, and set the merged routes of one that calls its base class again after an abort.

    The inner calls return no routes, so that verl doesn't merge them its own way.
    """
    prompt = _ids(kwargs["prompt_ids"])
    outer = _running.get()
    if outer is not None and outer[0] is self:
        output = await original(self, *args, **kwargs)
        if hasattr(output, "token_ids"):
            outer[1].append((prompt, output))
            output = output.model_copy(update={"routed_experts": None})
        return output
    parts: list[tuple[Array, Any]] = []
    token = _running.set((self, parts))
    try:
        output = await original(self, *args, **kwargs)
    finally:
        _running.reset(token)
    if not hasattr(output, "token_ids"):
        return output
    sample = _sample.get()
    if sample is None or sample.job is None or sample.job.client is not self:
        sample = Turns()
    elif not parts:
        _add(sample, prompt, output)
    for asked, part in parts:
        _add(sample, asked, part)
    if parts:
        output.routed_experts, _ = sample.routes_of(np.concatenate([prompt, _ids(output.token_ids)]))
    return output


def _add(turns: Turns, prompt: Array, output: Any) -> None:
    """Add a turn; where it is refused and the error would be lost, the sample goes on without its routes."""
    aborted = output.stop_reason in ("aborted", "abort")
    try:
        turns.add(prompt, _ids(output.token_ids), output.routed_experts, aborted=aborted)
    except ReplayError as error:
        if turns.job is None:
            raise
        turns.job.refuse(turns, error, output.routed_experts)
        output.routed_experts = None


async def _run_agent_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an agent loop, which hands its output to `_agent_loop_postprocess`."""
    if (job := _jobs.get(self)) is None:
        job = _jobs[self] = _Job(self)
    if not job.wanted or not list(_patches):
        return await original(self, *args, **kwargs)
    if "_agent_loop_postprocess" not in vars(self):
        # On the instance, because a subclass, also one of the job's main module, has a method of its own.
        corrected = functools.partial(_agent_loop_postprocess, job)
        _patches.wrap(self, "_agent_loop_postprocess", corrected, _CORRECT)
    trajectory = kwargs.get("trajectory") or args[1]
    token = _sample.set(Turns(job, None if trajectory["validate"] else int(trajectory["step"])))
    try:
        return await original(self, *args, **kwargs)
    finally:
        _sample.reset(token)


async def _agent_loop_postprocess(job: _Job, original: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    turns = _sample.get() or Turns()
    for sample in output if isinstance(output, list) else [output]:
        try:
            rows = job.routes_of(sample, turns)
        except ReplayError as error:
            job.refuse(turns, error)
            rows = job.routes_of(sample, turns)
        sample.routed_experts = rows
        if job.putter is not None:
            job.putter.put_away(sample, turns.step)
    return await original(output, *args, **kwargs)


def _postprocess(original: Any, self: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Fill samples without routes with zeros: verl takes the first sample for all when it joins a batch."""
    having = next((sample.routed_experts for sample in inputs if sample.routed_experts is not None), None)
    if having is not None:
        for sample in inputs:
            if sample.routed_experts is None:
                sample.routed_experts = torch.zeros_like(having)
    return original(self, inputs, *args, **kwargs)


def _as_array(routes: Any) -> Array:
    rows = routes.detach().cpu().numpy() if isinstance(routes, torch.Tensor) else np.asarray(routes)
    if is_ids(rows):
        return rows
    raise ReplayError(
        "the rollout engine's routes can't be read",
        where="rollout",
        expected="whole numbers, [tokens, layers, topk]",
        got=f"{type(routes).__name__} of {rows.dtype}, {list(rows.shape)}",
        cause="an engine of a release that this verl wasn't made for",
    )


def _narrow(rows: Array) -> Array:
    """Return uint8 as it is, and anything else as int16, which torch can work with."""
    if rows.dtype == np.uint8:
        return rows
    if rows.size and rows.max() > _WIDEST:
        raise ReplayError(
            "an expert id of the rollout engine is too large",
            where="rollout",
            expected=f"at most {_WIDEST}",
            got=int(rows.max()),
            cause="memory that was never written, or physical ids",
        )
    return rows.astype(np.int16)


def _ids(tokens: Any) -> Array:
    """Return token ids, [tokens]; of what a tokenizer's chat template returns, its input_ids."""
    ids = tokens["input_ids"] if isinstance(tokens, Mapping) else getattr(tokens, "input_ids", tokens)
    return np.asarray(ids, dtype=np.int64).reshape(-1)


def _common(first: Array, second: Array) -> int:
    """Return the length of the common beginning of two token lists."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


_patches = Patches(_WHAT)
