"""npu-replay smoke: does routing replay work on this stack, over these processes and on this device?

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --json smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import npu_replay
from npu_replay.devices import megatron_on, one_thread
from npu_replay.errors import ReplayError
from npu_replay.routes.file import write_whole
from npu_replay.smoke.checks import FEATURES, Collectives, Feature, Model, Recompute, Trial, left_behind
from npu_replay.smoke.job import Job, Verdict, Watch, Wrong, caught, first_to_fail, place
from npu_replay.smoke.model import ROUTINGS, Routing
from npu_replay.smoke.options import SIZES, Options, parse
from npu_replay.smoke.report import FAIL, PASS, SKIP, Report, Result

USAGE = 2
"""Exit code for sizes that don't fit, the same as for a command line that can't be read."""

_START, _UNINSTALL = "start", "uninstall"


def main(options: Options, *, routings: Sequence[Routing] = ROUTINGS) -> int:
    """Run all features, print a line for each on rank 0, and write the JSON; return the exit code.

    Args:
        options: what the command line says.
        routings: the ways of routing to try.
    """
    rank, world = place()
    say = _Voice(rank == 0)
    if problem := options.problem(world):
        say(f"npu-replay smoke: {problem}", to=sys.stderr)
        return USAGE
    report = Report(_asked(options), options.split, world)
    smoke = Smoke(options, report, say, routings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of every rank
        smoke.run()
    return smoke.end()


def run_command_line(arguments: Sequence[str]) -> None:
    """The command where typer isn't installed; exits as it does."""
    raise SystemExit(main(parse(arguments)))


class _Voice:
    """Rank 0 speaks."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks

    def __call__(self, text: str, to: Any = None) -> None:
        if self.speaks:
            stream = to or sys.stdout
            stream.write(text + "\n")
            stream.flush()


class Smoke:
    """One run on this rank."""

    def __init__(self, options: Options, report: Report, say: _Voice, routings: Sequence[Routing]) -> None:
        self._options, self._report, self._say = options, report, say
        self._routings = routings
        self._trials: dict[str, Trial] = {}
        self._untried: dict[str, str] = {}  # ways of routing, and why no feature is tried with them

    def run(self) -> None:
        """Start, try every feature, and look for what is left."""
        begun = time.perf_counter()
        try:
            job = Job(self._options.split, self._options.device, self._options.patience)
        except Exception as error:  # noqa: BLE001  whatever fails here is the finding
            self._say(self._report.heading() + "\n")
            self._note([Result(_START, "", FAIL, caught(error).problem, trace=caught(error).trace)])
            return
        self._report.device = job.device
        self._say(self._report.heading() + "\n")
        topk = torch.topk, torch.Tensor.topk
        with Watch(job, self._conclude) as watch:
            with one_thread(), megatron_on(job.device):
                if self._start(job, watch, begun):
                    self._features(job, watch)
            self._uninstall(job, watch, topk)

    def end(self) -> int:
        """Write the JSON, say the verdict, and return the exit code."""
        code = 0 if self._report.passed else 1
        self._say(f"\n{self._report.verdict()}")
        path = self._options.json
        if path is not None and self._say.speaks:
            try:
                write_whole(path, self._report.to_json().encode(), overwrite=self._options.force)
                self._say(f"Wrote {path}")
            except ReplayError as error:
                self._say(str(error), to=sys.stderr)
                code = 1
        return code

    def _start(self, job: Job, watch: Watch, begun: float) -> bool:
        """Make Megatron's groups; did it work on all ranks?"""
        with watch.over(_START):
            verdict = Verdict()
            try:
                job.initialise()
                job.tell_mindspeed()
                self._untried = {one.name: why for one in self._routings if (why := one.missing())}
            except Exception as error:  # noqa: BLE001  whatever fails here is the finding
                verdict = caught(error)
                watch.failed(verdict.problem)
            result = _result(job, _START, "", job.share(verdict), lambda _: job.about(), begun)
        self._note([result])
        return result.result == PASS

    def _features(self, job: Job, watch: Watch) -> None:
        for feature in (Collectives(), *FEATURES):
            if isinstance(feature, Recompute) and not self._options.recompute:
                self._note([Result(feature.name, "", SKIP, "not asked for: --recompute")])
                continue
            routings = self._routings[:1] if isinstance(feature, Collectives) else self._routings
            self._note([self._try(job, watch, feature, routing) for routing in routings])

    def _try(self, job: Job, watch: Watch, feature: Feature, routing: Routing) -> Result:
        case = "" if isinstance(feature, Collectives) else routing.name
        if why := self._untried.get(routing.name):
            return Result(feature.name, case, SKIP, why)
        begun = time.perf_counter()
        with watch.over(feature.name):
            verdict = self._verdict(job, feature, routing)
            if verdict.broken:
                watch.failed(verdict.problem)
            verdicts = job.share(verdict)
            result = _result(job, feature.name, case, verdicts, feature.judge, begun)
            if any(one.broken for one in verdicts):
                self._trials.clear()
                job.initialise()
        if isinstance(feature, Model) and result.result == FAIL:
            self._untried[routing.name] = "not tried: the model doesn't train by itself"
        return result

    def _verdict(self, job: Job, feature: Feature, routing: Routing) -> Verdict:
        try:
            if routing.name not in self._trials:
                self._trials[routing.name] = Trial(job, routing)
            return Verdict(found=feature.examine(self._trials[routing.name]))
        except Exception as error:  # noqa: BLE001  whatever fails here is the finding
            return caught(error)

    def _uninstall(self, job: Job, watch: Watch, topk: tuple[Any, Any]) -> None:
        begun = time.perf_counter()
        with watch.over(_UNINSTALL):
            try:
                npu_replay.uninstall()
                verdict = Verdict(left_behind(list(self._trials.values()), topk))
            except ReplayError as error:
                verdict = caught(error)
            verdicts = job.share(verdict)
        said = "torch, Megatron and the models are as they were"
        self._note([_result(job, _UNINSTALL, "", verdicts, lambda _: said, begun)])

    def _note(self, results: list[Result]) -> None:
        self._report.results += results
        self._say(self._report.lines(results[0].feature))

    def _conclude(self, feature: str, reason: str) -> None:
        """On the thread of the watch: the main thread is in a collective that nobody will complete."""
        if self._say.speaks:
            rest = "; the features after it were not tried"
            self._note([Result(feature, "", FAIL, reason + rest)])
            self.end()
        else:
            time.sleep(5)  # torchrun ends all when one has ended, and rank 0 still writes
        os._exit(1)


def _result(
    job: Job,
    feature: str,
    case: str,
    verdicts: list[Verdict],
    judge: Callable[[list[Any]], str],
    begun: float,
) -> Result:
    """What the ranks' verdicts come to: the lowest rank that failed by itself is heard.

    Args:
        judge: says what was seen, or raises `Wrong`, from what all ranks found.
        begun: when the feature began.
    """
    rank, trace = None, []
    failed = first_to_fail(verdicts, job.patience)
    try:
        if failed is not None:
            rank, trace = failed, verdicts[failed].trace
            raise Wrong(verdicts[failed].problem)
        why, result = judge([one.found for one in verdicts]), PASS
    except Wrong as wrong:
        why, result = str(wrong), FAIL
    return Result(feature, case, result, why, rank, round(time.perf_counter() - begun, 3), trace)


def _asked(options: Options) -> dict[str, Any]:
    """The options that make a difference, for the report."""
    names = (*SIZES, "recompute", "device")
    return {name: getattr(options, name) for name in names}
