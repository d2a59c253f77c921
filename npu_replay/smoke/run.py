"""Run npu-replay smoke: try routing replay on this stack, over these processes and on this device.

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --out smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import npu_replay
from npu_replay import screen
from npu_replay.devices import megatron_on, one_thread
from npu_replay.errors import ReplayError
from npu_replay.options import WrongOption, message, write_out
from npu_replay.smoke.checks import FEATURES, Trial, left_behind
from npu_replay.smoke.job import Job, Wrong, place
from npu_replay.smoke.model import ROUTINGS
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, SKIP, Report, Result, first_to_fail
from npu_replay.tables import print_json

USAGE = 2
"""The exit code for sizes that don't fit, the same as for a wrong command line."""


def main(options: Options) -> int:
    """Run all features, print a line for each on rank 0, and write the JSON; return the exit code."""
    rank, world = place()
    if problem := options.problem(world):
        if rank == 0:
            raise WrongOption(problem)
        return USAGE
    with screen.quiet(f"smoke-rank{rank}", told=rank == 0) as log:
        smoke = Smoke(options)
        smoke.run()
        try:
            code = smoke.end()
        finally:
            smoke.job.leave()  # after rank 0 has written: torchrun kills all when one fails
    if code == 0:
        log.unlink(missing_ok=True)  # not needed after a success
    return code


class Smoke:
    """Runs smoke on this rank, with these ways of routing."""

    def __init__(self, options: Options, routings: Sequence[str] = tuple(ROUTINGS)) -> None:
        self._options, self._routings = options, routings
        self.job = Job(options)
        self.report = Report(options, self.job.world)
        self._trials: dict[str, Trial] = {}
        self._untried: set[str] = set()  # ways of routing with which the model doesn't train
        self._broken = False  # a collective failed, so process groups must be made anew
        self._asked = 0  # number of features begun, equal on all ranks

    def run(self) -> None:
        topk = torch.topk, torch.Tensor.topk
        started = self._try("start", "", self.job.prepare)
        self.report.device = self.job.device
        self._say(self.report.heading() + "\n")
        if started.result == FAIL:
            self._note([started])
            return
        with one_thread(), megatron_on(self.job.device):
            started = self._try("start", "", self.job.start)
            self._note([started])
            for feature in FEATURES if started.result == PASS else ():
                self._note(self._feature(feature))

        def uninstall() -> str:
            npu_replay.uninstall()
            chunks = itertools.chain.from_iterable(trial.chunks for trial in self._trials.values())
            left = left_behind(chunks, topk)
            Wrong.unless(not left, left)
            return "torch, Megatron and the models are as they were"

        self._note([self._try("uninstall", "", uninstall)])

    def end(self) -> int:
        self._say(f"\n{self.report.verdict()}")
        if self.job.rank == 0:
            if self._options.json:
                print_json(self.report.to_json())
            write_out(self._options.out, self.report.to_json().encode(), force=self._options.force)
        return 0 if self.report.passed else 1

    def _say(self, text: str) -> None:
        if self.job.rank == 0:
            to = screen.err() if self._options.json else screen.out()
            to.write(text + "\n")
            to.flush()

    def _note(self, results: list[Result]) -> None:
        self.report.results += results
        self._say(self.report.lines(results[0].feature))

    def _feature(self, feature: str) -> list[Result]:
        if feature == "recompute" and not self._options.recompute:
            return [Result(feature, "", SKIP, "not asked for: --recompute")]
        once, results = feature == "collectives", []
        for routing in self._routings[:1] if once else self._routings:
            case = "" if once else routing
            if routing in self._untried:
                results.append(Result(feature, case, SKIP, "the model doesn't train by itself"))
                continue

            def examine(routing: str = routing) -> str:
                if self._broken:
                    self.job.initialise()
                    self._broken = False
                if routing not in self._trials:
                    self._trials[routing] = Trial(self.job, routing)
                return FEATURES[feature](self._trials[routing])

            results.append(self._try(feature, case, examine))
            if feature == "model" and results[-1].result == FAIL:
                self._untried.add(routing)
        return results

    def _try(self, feature: str, case: str, examine: Callable[[], str]) -> Result:
        self._asked += 1
        patience = self._options.patience
        watch = threading.Timer(4 * patience, self._conclude, (feature,))
        watch.daemon = True
        watch.start()
        begun = time.perf_counter()
        try:
            try:
                found = Result(feature, case, PASS, examine())
            except Wrong as wrong:
                found = Result(feature, case, FAIL, message(wrong), self.job.rank)
            except Exception as error:  # noqa: BLE001  whatever fails here is the finding
                whose = "" if isinstance(error, ReplayError) else f"{type(error).__name__}: "
                why = f"{whose}{message(error)}".strip() or "no message"
                trace = [  # only the last folders of a path, for privacy
                    f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
                    for frame in traceback.extract_tb(error.__traceback__)[-6:]
                ]
                found = Result(feature, case, FAIL, why, self.job.rank, trace=trace, broken=True)
            found = replace(found, seconds=round(time.perf_counter() - begun, 3), at=time.time())
            results = self.job.share(str(self._asked), found)
        finally:
            watch.cancel()
        if any(one.broken for one in results):
            self._trials.clear()
            self._broken = True
        return first_to_fail(results, patience)

    def _conclude(self, feature: str) -> None:
        """End the job with its report, since a rank waits in a collective that will never complete.

        Runs on a timer's thread, since the main thread is in that collective.
        """
        try:
            if self.job.rank:
                time.sleep(5)  # torchrun kills all when one ends; rank 0 still writes
                return
            why = f"no end within {4 * self._options.patience:.0f} s: a rank waits in a collective"
            heard = self.job.heard(str(self._asked))
            found = first_to_fail(
                [*heard, Result(feature, "", FAIL, why, at=time.time())], self._options.patience
            )
            self._note([replace(found, why=f"{found.why}; the features after it were not tried")])
            self.end()
        finally:
            os._exit(1)
