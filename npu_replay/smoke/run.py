"""npu-replay smoke: does routing replay work on this stack, over these processes and on this device?

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --out smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import npu_replay
from npu_replay import screen
from npu_replay.devices import megatron_on, one_thread
from npu_replay.options import WrongOption, message, write_out
from npu_replay.smoke import hybrid_model
from npu_replay.smoke.checks import FEATURES, Examination, Trial, left_behind
from npu_replay.smoke.job import Job, Verdict, Wrong, first_to_fail, place
from npu_replay.smoke.model import ROUTINGS, Routing
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, SKIP, Report, Result
from npu_replay.tables import print_json

USAGE = 2
"""Exit code for sizes that don't fit, the same as for a command line that can't be read."""


def main(options: Options) -> int:
    """Run all features, print a line for each on rank 0, and write the JSON; return the exit code."""
    rank, world = place()
    if problem := options.problem(world):
        if rank == 0:
            raise WrongOption(problem)
        return USAGE
    with screen.quiet(f"smoke-rank{rank}", told=rank == 0):
        smoke = Smoke(options)
        smoke.run()
        try:
            return smoke.end()
        finally:
            smoke.leave()


class Smoke:
    """One run on this rank.

    Args:
        options: what the command line says.
        routings: the ways of routing to try.
    """

    def __init__(self, options: Options, routings: Sequence[Routing] = ROUTINGS) -> None:
        self._options, self._routings = options, routings
        self._rank, world = place()
        self.report = Report(options, world)
        self._ended = self.report.started  # of the last feature
        self._trials: dict[str, Trial] = {}
        self._untried: dict[str, str] = {}  # ways of routing, and why no feature is tried with them
        self._broken = False  # the process groups: a rank may have waited in vain
        self._asked = 0  # how many features were begun: all ranks count alike

    def run(self) -> None:
        """Start, try every feature, and look for what is left."""
        try:
            self._job = Job(self._options)
        except Exception as error:  # noqa: BLE001  whatever fails here is the finding
            self._say(self.report.heading() + "\n")
            verdict = Verdict.of(error)
            self._note([Result("start", "", FAIL, verdict.problem, trace=verdict.trace)])
            return
        self.report.device = self._job.device
        self._say(self.report.heading() + "\n")
        topk = torch.topk, torch.Tensor.topk
        with one_thread(), megatron_on(self._job.device):
            started = self._try("start", "", self._start)
            self._note([started])
            for feature in FEATURES if started.result == PASS else ():
                self._note(self._feature(feature))
        self._note([self._try("uninstall", "", partial(self._uninstall, topk))])

    def end(self) -> int:
        """Write the JSON, say the verdict, and return the exit code."""
        self._say(f"\n{self.report.verdict()}")
        if self._rank == 0:
            if self._options.json:
                print_json(self.report.to_json())
            write_out(self._options.out, self.report.to_json().encode(), force=self._options.force)
        return 0 if self.report.passed else 1

    def leave(self) -> None:
        """End the process groups, after rank 0 has written: torchrun ends all when one has failed."""
        if hasattr(self, "_job"):
            self._job.leave()

    def _say(self, text: str) -> None:
        """Rank 0 speaks."""
        if self._rank == 0:
            to = screen.err() if self._options.json else screen.out()
            to.write(text + "\n")
            to.flush()

    def _note(self, results: list[Result]) -> None:
        self.report.results += results
        self._say(self.report.lines(results[0].feature))

    def _start(self) -> Examination:
        if self._options.model == "hybrid" and (why := hybrid_model.missing(self._options.pattern)):
            raise Wrong(f"--model hybrid: {why}")
        self._job.initialise()
        self._job.tell_mindspeed()
        self._untried = {one.name: why for one in self._routings if (why := one.missing())}
        yield None
        return self._job.about()

    def _feature(self, feature: str) -> list[Result]:
        """Try a feature with each way of routing."""
        if feature == "recompute" and not self._options.recompute:
            return [Result(feature, "", SKIP, "not asked for: --recompute")]
        once = feature == "collectives"
        results = []
        for routing in self._routings[:1] if once else self._routings:
            case = "" if once else routing.name
            if why := self._untried.get(routing.name):
                results.append(Result(feature, case, SKIP, why))
                continue
            results.append(self._try(feature, case, partial(self._tried, feature, routing)))
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
        left = left_behind(chunks, topk)
        Wrong.unless(not left, left)
        yield None
        return "torch, Megatron and the models are as they were"

    def _try(self, feature: str, case: str, examine: Callable[[], Examination]) -> Result:
        """Examine on all ranks. The lowest rank that failed by itself is heard."""
        self._asked += 1
        watch = threading.Timer(4 * self._options.patience, self._conclude, (feature,))
        watch.daemon = True
        watch.start()
        examination = examine()
        try:
            try:
                verdict = Verdict(found=next(examination))
            except Exception as error:  # noqa: BLE001  whatever fails here is the finding
                verdict = Verdict.of(error)
                if verdict.broken:  # for the others, which may be stuck in a collective
                    self._job.store.set(f"failed/{self._asked}", f"rank {self._rank}: {verdict.problem}")
            verdicts = self._job.share(verdict)
        finally:
            watch.cancel()
        if any(one.broken for one in verdicts):
            self._trials.clear()
            self._broken = True
        result, rank, trace = FAIL, first_to_fail(verdicts, self._options.patience), []
        if rank is not None:
            why, trace = verdicts[rank].problem, verdicts[rank].trace
        else:
            try:
                examination.send([one.found for one in verdicts])
                raise AssertionError(f"{feature} yields twice")
            except StopIteration as end:
                why, result = end.value, PASS
            except Wrong as wrong:
                why = message(wrong)
        begun, self._ended = self._ended, time.perf_counter()
        return Result(feature, case, result, why, rank, round(self._ended - begun, 3), trace)

    def _conclude(self, feature: str) -> None:
        """End the job with its report: a rank waits in a collective that nobody will complete.

        On the thread of a timer, since the main thread is in that collective.
        """
        try:
            if self._rank:
                time.sleep(5)  # torchrun ends all when one has ended, and rank 0 still writes
                return
            reason = f"no end within {4 * self._options.patience:.0f} s: a rank waits in a collective"
            key = f"failed/{self._asked}"
            if self._job.store.check([key]):
                reason = self._job.store.get(key).decode()
            rest = "; the features after it were not tried"
            self._note([Result(feature, "", FAIL, reason + rest)])
            self.end()
        finally:
            os._exit(1)
