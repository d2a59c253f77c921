"""npu-replay smoke: does routing replay work on this stack, over these processes and on this device?

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --out smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

import npu_replay
from npu_replay import screen
from npu_replay.devices import megatron_on, one_thread
from npu_replay.errors import ReplayError
from npu_replay.options import message, write_out
from npu_replay.smoke import hybrid_model
from npu_replay.smoke.checks import FEATURES, Examination, Trial, left_behind
from npu_replay.smoke.job import Job, Verdict, Watch, Wrong, caught, first_to_fail, place
from npu_replay.smoke.model import ROUTINGS, Routing
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, SKIP, Report, Result
from npu_replay.tables import print_json, show_error

USAGE = 2
"""Exit code for sizes that don't fit, the same as for a command line that can't be read."""


def main(options: Options) -> int:
    """Run all features, print a line for each on rank 0, and write the JSON; return the exit code."""
    rank, world = place()
    if problem := options.problem(world):
        if rank == 0:
            show_error(problem, as_json=options.json)
        return USAGE
    with screen.quiet(f"smoke-rank{rank}", told=rank == 0):
        smoke = Smoke(options)
        smoke.run()
        return smoke.end()


def say(text: str, to: TextIO) -> None:
    """Rank 0 speaks."""
    if place()[0] == 0:
        to.write(text + "\n")
        to.flush()


class Smoke:
    """One run on this rank.

    Args:
        options: what the command line says.
        routings: the ways of routing to try.
    """

    def __init__(self, options: Options, routings: Sequence[Routing] = ROUTINGS) -> None:
        self._options, self._routings = options, routings
        self.report = Report(options, place()[1])
        self._ended = self.report.started  # of the last feature
        self._trials: dict[str, Trial] = {}
        self._untried: dict[str, str] = {}  # ways of routing, and why no feature is tried with them
        self._broken = False  # the process groups: a rank may have waited in vain

    def run(self) -> None:
        """Start, try every feature, and look for what is left."""
        try:
            self._job = Job(self._options)
        except Exception as error:  # noqa: BLE001  whatever fails here is the finding
            self._say(self.report.heading() + "\n")
            verdict = caught(error)
            self._note([Result("start", "", FAIL, verdict.problem, trace=verdict.trace)])
            return
        self.report.device = self._job.device
        self._say(self.report.heading() + "\n")
        self._watch = Watch(self._job, self._conclude)
        topk = torch.topk, torch.Tensor.topk
        with one_thread(), megatron_on(self._job.device):
            started = self._try("start", "", self._start)
            self._note([started])
            for feature in FEATURES if started.result == PASS else ():
                self._note(self._feature(feature))
        self._note([self._try("uninstall", "", functools.partial(self._uninstall, topk))])

    def end(self) -> int:
        """Write the JSON, say the verdict, and return the exit code."""
        code = 0 if self.report.passed else 1
        self._say(f"\n{self.report.verdict()}")
        if place()[0]:
            return code
        if self._options.json:
            print_json(self.report.to_json())
        try:
            write_out(self._options.out, self.report.to_json().encode(), force=self._options.force)
        except ReplayError as error:
            show_error(message(error), as_json=False)
            return 1
        return code

    def _say(self, text: str) -> None:
        say(text, to=screen.err() if self._options.json else screen.out())

    def _start(self) -> Examination:
        if self._options.model == "hybrid" and (why := hybrid_model.missing(self._options.pattern)):
            raise Wrong(f"--model hybrid: {why}")
        self._job.initialise()
        self._job.tell_mindspeed()
        self._untried = {one.name: why for one in self._routings if (why := one.missing())}
        yield None
        return self._job.about()

    def _feature(self, feature: str) -> list[Result]:
        if feature == "recompute" and not self._options.recompute:
            return [Result(feature, "", SKIP, "not asked for: --recompute")]
        once = feature == "collectives"
        results = []
        for routing in self._routings[:1] if once else self._routings:
            case = "" if once else routing.name
            if why := self._untried.get(routing.name):
                results.append(Result(feature, case, SKIP, why))
                continue
            results.append(self._try(feature, case, functools.partial(self._tried, feature, routing)))
            if feature == "model" and results[-1].result == FAIL:
                self._untried[routing.name] = "not tried: the model doesn't train by itself"
        return results

    def _tried(self, feature: str, routing: Routing) -> Examination:
        if self._broken:
            self._job.initialise()
            self._broken = False
        if routing.name not in self._trials:
            self._trials[routing.name] = Trial(self._job, routing)
        return (yield from FEATURES[feature](self._trials[routing.name]))

    def _uninstall(self, topk: tuple[Any, Any]) -> Examination:
        npu_replay.uninstall()
        chunks = itertools.chain.from_iterable(trial.chunks for trial in self._trials.values())
        if left := left_behind(chunks, topk):
            raise Wrong(left)
        yield None
        return "torch, Megatron and the models are as they were"

    def _try(self, feature: str, case: str, examine: Callable[[], Examination]) -> Result:
        """Examine on all ranks. The lowest rank that failed by itself is heard."""
        rank, trace = None, []
        with self._watch.over(feature):
            examination = examine()
            try:
                verdict = Verdict(found=next(examination))
            except Exception as error:  # noqa: BLE001  whatever fails here is the finding
                verdict = caught(error)
                if verdict.broken:
                    self._watch.failed(verdict.problem)
            verdicts = self._job.share(verdict)
        if any(one.broken for one in verdicts):
            self._trials.clear()
            self._broken = True
        result, rank = FAIL, first_to_fail(verdicts, self._options.patience)
        if rank is not None:
            why, trace = verdicts[rank].problem, verdicts[rank].trace
        else:
            try:
                examination.send([one.found for one in verdicts])
                raise AssertionError(f"{feature} yields twice")
            except StopIteration as end:
                why, result = end.value, PASS
            except Wrong as wrong:
                why = str(wrong)
        begun, self._ended = self._ended, time.perf_counter()
        return Result(feature, case, result, why, rank, round(self._ended - begun, 3), trace)

    def _note(self, results: list[Result]) -> None:
        self.report.results += results
        self._say(self.report.lines(results[0].feature))

    def _conclude(self, feature: str, reason: str) -> None:
        """On the thread of the watch: the main thread is in a collective that nobody will complete."""
        if place()[0] == 0:
            rest = "; the features after it were not tried"
            self._note([Result(feature, "", FAIL, reason + rest)])
            self.end()
        else:
            time.sleep(5)  # torchrun ends all when one has ended, and rank 0 still writes
        os._exit(1)
