"""One pass of a verl engine: its model is known, its ranks leave together, and its figures are told.

`forward_backward_batch` of an engine (0.7.1 on) or of a worker's actor (0.7) runs one schedule. It is
wrapped: what verl's actions open meanwhile is on that engine's chunks, and closed before an optimizer steps.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from npu_replay.compat import probe
from npu_replay.compat.patching.patches import when_undone
from npu_replay.compat.verl.actions import switch
from npu_replay.compat.verl.announce import announce
from npu_replay.compat.verl.files import Files
from npu_replay.errors import ReplayError, share
from npu_replay.parallel import bad_samples
from npu_replay.parallel.ranks import agreed, all_here
from npu_replay.sessions.stepwise import Feed, Tap

PREFIX = "npu_replay/"
_CEILING = "NPU_REPLAY_BAD_SAMPLES"
_FAR = "NPU_REPLAY_MAX_LIVE_MISMATCH"

_COUNTED = (
    *("rows", "routed", "samples", "bad_samples"),
    *("dropped", "chosen", "differing", "compared", "replayed", "routers", "microseconds"),
)


@dataclass
class _Engine:
    """What is kept of an engine between its passes."""

    files: Files | None = None
    updates: int = 0
    announced: bool = False
    met: bool = False
    """Have its ranks met before a first pass?"""


_engines: WeakKeyDictionary[Any, _Engine] = WeakKeyDictionary()


def wrapped(
    original: Callable[..., Any], chunks_of: Callable[[Any], Any], settings_of: Callable[[Any], Any]
) -> Any:
    """`forward_backward_batch`, as a pass of a job.

    Args:
        original: verl's.
        chunks_of: the model chunks of the engine or actor that it is called on.
        settings_of: its router_replay settings: mode ("R2", "R3" or "disabled"), record_file, replay_file.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self)
        if settings.mode == "disabled":
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if switch.is_off:
            _ask_for_none(given.arguments["data"])
            return original(self, *args, **kwargs)
        if (engine := _engines.get(self)) is None:
            engine = _engines[self] = _Engine(Files.of(settings))
        job = Pass(
            list(chunks_of(self)),
            settings.mode,
            engine,
            trains=not given.arguments.get("forward_only", False),
        )
        data = given.arguments["data"]
        files = engine.files if _asks_for_one(data) else None
        if files is not None:
            job.unread = _problem_of(files.give, data)
        with switch.running(job):
            output = original(self, *args, **kwargs)
            if files is not None and self.is_mp_src_rank_with_outputs():
                unwritten = _problem_of(files.keep, data, output, self.tf_config, settings.mode)
                if unwritten is not None:
                    raise unwritten
        if job.trains:
            _add_metrics(output, job.metrics)
        return output

    return forward_backward_batch


def refuse_engines() -> None:
    """npu_replay is being uninstalled: engines that were built with it can't replay by verl's own means.

    Their routers lack what verl's patch hangs on them, and they would go on without a replay, unnoticed.
    """
    for engine in list(_engines):
        engine.forward_backward_batch = _refuses


when_undone(refuse_engines)


def restore_engines() -> None:
    """npu_replay is installed again: engines that were refused can go on, built with it as they are."""
    for engine in list(_engines):
        if vars(engine).get("forward_backward_batch") is _refuses:
            del engine.forward_backward_batch


def _refuses(*args: Any, **kwargs: Any) -> Any:
    raise ReplayError(
        "npu_replay was uninstalled after this engine had replayed with it",
        expected="uninstall() before the engine is built, or NPU_REPLAY_DISABLE=1 from the start",
        got="uninstall() in the middle of a job",
        cause="start the workers anew to go on without npu_replay, or npu_replay.install() to go on with it",
    )


def _ask_for_none(data: Any) -> None:
    """An engine reads in its batch whether it records or replays; a worker's actor asks the switch."""
    if (flags := _flags_of(data)) is not None:
        flags.assign_non_tensor(data, enable_routing_replay=False)


def _asks_for_one(data: Any) -> bool:
    flags = _flags_of(data)
    return flags is not None and bool(flags.get_non_tensor_data(data, "enable_routing_replay", False))


def _flags_of(data: Any) -> Any:
    """verl's functions for what isn't a tensor in a batch; None for a batch that has no such."""
    flags: Any = sys.modules.get("verl.utils.tensordict_utils")
    batches: Any = sys.modules.get("tensordict")  # an actor's DataProto is none
    known = flags is not None and batches is not None and isinstance(data, batches.TensorDictBase)
    return flags if known else None


def _problem_of(function: Callable[..., None], *arguments: Any) -> ReplayError | None:
    """Why it failed: the other ranks wait to hear of it, whatever it is."""
    try:
        function(*arguments)
    except ReplayError as error:
        return error
    except Exception as error:  # noqa: BLE001  it is raised when all ranks can leave
        unknown = ReplayError("routes in files failed", got=repr(error), expected="to read or write them")
        unknown.__cause__ = error
        return unknown
    return None


@dataclass
class Pass:
    """One schedule of an engine.

    Attributes:
        chunks: of the model.
        mode: "R2" or "R3".
        engine: what is kept of it.
        trains: does it run backward?
        metrics: plain numbers, when it is settled.
        unread: why this rank has no routes from files, if it should have some.
    """

    chunks: list[nn.Module]
    mode: str
    engine: _Engine
    trains: bool
    metrics: dict[str, float] = field(default_factory=dict)
    unread: ReplayError | None = None
    _counted: dict[str, int] = field(default_factory=dict)
    _ceiling: int = 0
    """The share of bad samples that is let through, in millionths; the same on all ranks once begun."""

    @property
    def r3(self) -> bool:
        """Do the routes come from a rollout engine?"""
        return self.mode == "R3"

    @property
    def tolerant(self) -> bool:
        """Not in the first step: what is wrong there is wrong in all."""
        return self.engine.updates > 0

    def compares(self) -> bool:
        """On every n-th update, since it costs the live router's top-k."""
        every = int(_setting("NPU_REPLAY_METRICS_EVERY", 10))
        return self.trains and every > 0 and self.engine.updates % every == 0

    def most_live_mismatch(self) -> float | None:
        """In the first update's first micro-batch: routes that are laid out wrong show there.

        Raises:
            ReplayError: the environment says no share.
        """
        if not self.trains or self.engine.updates:
            return None
        return share(os.environ.get(_FAR, "").strip() or 0.3, _FAR, "token-layers")

    def count(self, **figures: int) -> None:
        """Add to the figures of this pass."""
        for name, value in figures.items():
            self._counted[name] = self._counted.get(name, 0) + value

    def begin(self, error: ReplayError | None) -> None:
        """Before the schedule, in which a rank that isn't there would be waited for.

        Raises:
            ReplayError: any rank can't record or replay, or they were told different ceilings.
        """
        if not self.engine.met:
            all_here()
            self.engine.met = True
        unread = self._read_ceiling()
        told = {"ranks": 1, "ceilings": self._ceiling, "squares": self._ceiling**2}
        _on_every_rank(self._differing(agreed(error or self.unread or unread, told)))

    def _read_ceiling(self) -> ReplayError | None:
        try:
            ceiling = share(os.environ.get(_CEILING, "").strip() or bad_samples.CEILING, _CEILING, "samples")
        except ReplayError as error:
            return error
        self._ceiling = round(ceiling * 1e6)
        return None

    def _differing(self, sums: dict[str, int]) -> ReplayError | None:
        """Each rank reads its own environment. By the sums all see alike whether one read another number."""
        if sums["ranks"] * sums["squares"] == sums["ceilings"] ** 2:  # by Cauchy-Schwarz: all are equal
            return None
        mean = sums["ceilings"] / sums["ranks"] / 1e6
        return ReplayError(
            f"{_CEILING} differs between the ranks",
            where="all ranks",
            expected="one number on all ranks: they leave together, or go on together",
            got=f"{self._ceiling / 1e6:g} on this one, {mean:g} in the mean of all",
            cause="it was set on some nodes only; set it in the runtime_env of the job",
        )

    def settle(self, session: Feed | Tap | None, error: ReplayError | None) -> None:
        """Agree with the other ranks, say once that it is on, and keep the figures.

        Raises:
            ReplayError: an error of any rank, or too many samples with bad routes.
        """
        if session is None and error is None:
            return
        sums = agreed(error, self._figures(session))
        _on_every_rank(self._above_ceiling(sums))
        if isinstance(session, Feed):
            self.metrics = _metrics(sums)
            if not self.engine.announced:
                self.engine.announced = True
                _announce(self.mode, sums)
        if self.trains:
            self.engine.updates += 1

    def _figures(self, session: Feed | Tap | None) -> dict[str, int]:
        if session is not None:
            self.count(**session.counts())
        return dict.fromkeys(_COUNTED, 0) | self._counted | {"ranks": 1}

    def _above_ceiling(self, sums: dict[str, int]) -> ReplayError | None:
        return bad_samples.above_ceiling(
            sums["bad_samples"], sums["samples"], self._ceiling / 1e6, setting=_CEILING, where="all ranks"
        )


def _on_every_rank(problem: ReplayError | None) -> None:
    """Raise what all ranks have found alike; the first has the whole message."""
    if problem is not None:
        agreed(problem if not dist.is_initialized() or dist.get_rank() == 0 else None, {})


def _setting(name: str, default: float) -> float:
    """A number that the user has set in the environment."""
    told = os.environ.get(name, "")
    try:
        return float(told) if told.strip() else default
    except ValueError as error:
        raise ReplayError(f"{name} must be a number", expected=f"{default:g}, for one", got=told) from error


def _metrics(sums: dict[str, int]) -> dict[str, float]:
    figures = {
        "rows_without_route": 1 - sums["routed"] / max(sums["rows"], 1),
        "bad_samples": float(sums["bad_samples"]),
        "seconds": sums["microseconds"] / 1e6 / sums["ranks"],
    }
    if sums["compared"]:
        figures["live_mismatch"] = sums["differing"] / sums["compared"]
    if sums["chosen"]:
        figures["capacity_dropped"] = sums["dropped"] / sums["chosen"]
    return {PREFIX + name: value for name, value in figures.items()}


def _add_metrics(output: Any, metrics: dict[str, float]) -> None:
    """Into verl's own, where this rank has some: {"metrics": {name: [values]}}, or 0.7's by micro-batch."""
    if not metrics or not isinstance(output, dict):
        return
    if isinstance(output.get("metrics"), dict):
        output["metrics"].update({name: [value] for name, value in metrics.items()})
    elif output.get("output") and isinstance(output["output"], list):
        first = output["output"][0]
        first = first[0] if isinstance(first, list | tuple) else first
        if isinstance(first, dict):
            first.update(metrics)


def _announce(mode: str, sums: dict[str, int]) -> None:
    """The one line that says that it is on."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    stages = _pipeline_stages()
    routers, replayed = (sums[name] * stages // sums["ranks"] for name in ("routers", "replayed"))
    routed = sums["routed"] / max(sums["rows"], 1)
    ranks = "1 rank" if sums["ranks"] == 1 else f"{sums['ranks']} ranks agree"
    announce(
        f"{mode}: {routers} routers, {replayed} replayed, {_percent(routed)} of rows had a route, {ranks} "
        f"({', '.join(('seam', *_versions()))})"
    )


def _percent(share: float) -> str:
    """Never 100% of what is less."""
    return "100%" if share == 1 else f"{min(share * 100, 99.99):.2f}%"


def _pipeline_stages() -> int:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    return int(state.get_pipeline_model_parallel_world_size())


def _versions() -> list[str]:
    """«Megatron 0.12.1», and MindSpeed's where it is imported."""
    names = {"megatron-core": "Megatron"}
    if "mindspeed" in sys.modules:
        names["mindspeed"] = "MindSpeed"
    return [
        f"{names[product.name]} {product.version or '?'}"
        for product in probe.products()
        if product.name in names and product.found
    ]
