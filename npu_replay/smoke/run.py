"""Run npu-replay smoke: try routing replay on this stack, over these processes and on this device.

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --out smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.

A rank that fails in a schedule leaves the others in a collective that will never complete. gloo gives up
after the job's patience, and the next feature gets new groups. NCCL and HCCL don't raise an error that can be
caught: there a timer ends the job, with what is known by then.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import npu_replay
from npu_replay import devices, screen
from npu_replay.compat import probe
from npu_replay.compat.mindspeed import adaptors
from npu_replay.errors import ReplayError
from npu_replay.options import WrongOption, message, write_out
from npu_replay.smoke import megatron_model
from npu_replay.smoke.checks import FEATURES, Trial, Wrong, left_behind
from npu_replay.smoke.model import ROUTINGS, config
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, SKIP, Report, Result, first_to_fail
from npu_replay.tables import print_json

USAGE = 2
"""The exit code for sizes that don't fit, the same as for a wrong command line."""

_MINDSPEED = adaptors.MODULES[adaptors.UNDER_MINDSPEED]
_READ_BY_MINDSPEED = (
    *("num_layers", "hidden_size", "num_attention_heads", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_expert_capacity_factor"),
    *("moe_shared_expert_intermediate_size", "moe_permute_fusion", "tensor_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "sequence_parallel", "gradient_accumulation_fusion", "fp8"),
)
"""Fields of Megatron's config."""


def main(options: Options) -> int:
    """Run all features, print a line for each on rank 0, and write the JSON; return the exit code."""
    rank, world = _place()
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
            smoke.leave()  # after rank 0 has written: torchrun kills all when one fails
    if code == 0:
        log.unlink(missing_ok=True)  # not needed after a success
    return code


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from torchrun; 0 and 1 without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Smoke:
    """Runs smoke on this rank of a job, with these ways of routing.

    Args:
        store: where ranks tell each other results; None makes one for the job.
    """

    def __init__(
        self, options: Options, routings: Sequence[str] = tuple(ROUTINGS), store: Any = None
    ) -> None:
        self.options, self._routings = options, routings
        self.rank, self.world = _place()
        if store is None:
            store = dist.HashStore()  # type: ignore[attr-defined]
            if "RANK" in os.environ:
                store = next(iter(dist.rendezvous("env://")))[0]  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("smoke", store)  # type: ignore[attr-defined]
        self.report = Report(options, self.world)
        self._trials: dict[str, Trial] = {}
        self._broken = False  # a collective failed, so process groups must be made anew
        self._asked = 0  # number of features begun, equal on all ranks

    def run(self) -> None:
        topk = torch.topk, torch.Tensor.topk
        prepared = self._try("start", "", self._prepare)
        self._say(self.report.heading() + "\n")
        if prepared.result == FAIL:
            self._note([prepared])
            return
        untried: set[str] = set()  # ways of routing with which the model doesn't train
        with devices.one_thread(), devices.megatron_on(self.device):
            started = self._try("start", "", self._start)
            self._note([started])
            for feature in FEATURES if started.result == PASS else ():
                if feature == "recompute" and not self.options.recompute:
                    self._note([Result(feature, "", SKIP, "not asked for: --recompute")])
                    continue
                once, results = feature == "collectives", []
                for routing in self._routings[:1] if once else self._routings:
                    case = "" if once else routing
                    if routing in untried:
                        results.append(Result(feature, case, SKIP, "the model doesn't train by itself"))
                        continue
                    results.append(self._try(feature, case, partial(self._examine, feature, routing)))
                    if feature == "model" and results[-1].result == FAIL:
                        untried.add(routing)
                self._note(results)

        def uninstall() -> str:
            npu_replay.uninstall()
            chunks = itertools.chain.from_iterable(trial.chunks for trial in self._trials.values())
            left = left_behind(chunks, topk)
            Wrong.unless(not left, left)
            return "torch, Megatron and the models are as they were"

        self._note([self._try("uninstall", "", uninstall)])

    def end(self) -> int:
        """Print the verdict and write the report; return the exit code."""
        self._say(f"\n{self.report.verdict()}")
        if self.rank == 0:
            if self.options.json:
                print_json(self.report.to_json())
            write_out(self.options.out, self.report.to_json().encode(), force=self.options.force)
        return 0 if self.report.passed else 1

    def leave(self) -> None:
        """Destroy all process groups, once every rank has come here.

        gloo's threads end a process with SIGABRT if it exits while they still run: on a busy machine in every
        second run of four processes.
        """
        self.share("leave", None, self.options.patience)
        if dist.is_initialized():
            dist.destroy_process_group()

    # Steps of a run: each returns a line about what it saw

    def _prepare(self) -> str:
        self.device = self.report.device = devices.pick(self.options.device)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        import_adaptors()
        probe.require(probe.MEGATRON, "smoke")
        importlib.import_module("megatron.core.parallel_state")
        return ""

    def _start(self) -> str:
        """Make the process groups, and configure MindSpeed."""
        options = self.options
        if options.model == "hybrid" and (why := megatron_model.hybrid_lacks(options.pattern)):
            raise Wrong(f"--model hybrid: {why}")
        backend = devices.backend(self.device)
        # NCCL and HCCL end the process at their timeout, without a report: the timer must come first.
        self._timeout = options.patience * (1 if backend == "gloo" else 20)
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("model", self.store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self._timeout),
            )
        self.initialise()
        if _MINDSPEED not in sys.modules:
            return f"Megatron's process groups over {backend}"
        adaptor: Any = sys.modules[_MINDSPEED]
        arguments: Any = importlib.import_module("mindspeed.args_utils")
        with contextlib.suppress(ModuleNotFoundError):  # a wheel of megatron-core has no megatron.training
            importlib.import_module("megatron.training.global_vars").set_args(arguments.get_mindspeed_args())
        if hasattr(adaptor, "repatch"):  # MindSpeed 2.1 keeps the arguments from its import otherwise
            about = config(options)
            given = {name: getattr(about, name) for name in _READ_BY_MINDSPEED if hasattr(about, name)}
            given |= {
                "optimization_level": 2,
                "num_experts": options.experts,
                "gemm_gradient_accumulation_fusion": False,
                "use_gmm_fp8": False,
                "context_parallel_algo": "megatron_cp_algo",  # cuts sequences as Megatron does
                "reset_position_ids": False,
                "reset_attention_mask": False,
            }
            adaptor.repatch(vars(arguments.get_mindspeed_args(get_defaults=True)) | given)
        return f"MindSpeed's and Megatron's process groups over {backend}"

    def initialise(self) -> None:
        """Make Megatron's process groups anew: those of a rank that waited in vain can't be used again."""
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            **self.options.megatron_sizes,
            distributed_timeout_minutes=self._timeout / 60,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def _examine(self, feature: str, routing: str) -> str:
        if self._broken:
            self.initialise()
            self._broken = False
        if routing not in self._trials:
            self._trials[routing] = Trial(self.options, routing, self.device, self.share)
        return FEATURES[feature](self._trials[routing])

    # What ranks tell each other and the user

    def share(self, name: str, value: Any, patience: float = math.inf) -> list[Any]:
        """Return the values that all ranks give under this name."""
        self.store.set(f"{name}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes
        # Polled, since a wait inside the store would block the timer's thread.
        until = time.monotonic() + patience
        while not self.store.check([f"{name}/{rank}" for rank in range(self.world)]):
            Wrong.unless(time.monotonic() < until, f"no word of another rank within {patience:.0f} s")
            time.sleep(0.01)
        return self._heard(name)

    def _heard(self, name: str) -> list[Any]:
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        return [pickle.loads(self.store.get(key)) for key in keys if self.store.check([key])]

    def _say(self, text: str) -> None:
        if self.rank == 0:
            to = screen.err() if self.options.json else screen.out()
            to.write(text + "\n")
            to.flush()

    def _note(self, results: list[Result]) -> None:
        self.report.results += results
        self._say(self.report.lines(results[0].feature))

    def _try(self, feature: str, case: str, examine: Callable[[], str]) -> Result:
        self._asked += 1
        patience = self.options.patience
        watch = threading.Timer(4 * patience, self._conclude, (feature,))
        watch.daemon = True
        watch.start()
        begun = time.perf_counter()
        try:
            try:
                found = Result(feature, case, PASS, examine())
            except Wrong as wrong:
                found = Result(feature, case, FAIL, message(wrong), self.rank)
            except Exception as error:  # noqa: BLE001  whatever fails here is the finding
                whose = "" if isinstance(error, ReplayError) else f"{type(error).__name__}: "
                why = f"{whose}{message(error)}".strip() or "no message"
                trace = [  # only the last folders of a path, for privacy
                    f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
                    for frame in traceback.extract_tb(error.__traceback__)[-6:]
                ]
                found = Result(feature, case, FAIL, why, self.rank, trace=trace, broken=True)
            found = replace(found, seconds=round(time.perf_counter() - begun, 3), at=time.time())
            results = self.share(str(self._asked), found)
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
            if self.rank:
                time.sleep(5)  # torchrun kills all when one ends; rank 0 still writes
                return
            why = f"no end within {4 * self.options.patience:.0f} s: a rank waits in a collective"
            heard = self._heard(str(self._asked))
            found = first_to_fail(
                [*heard, Result(feature, "", FAIL, why, at=time.time())], self.options.patience
            )
            self._note([replace(found, why=f"{found.why}; the features after it were not tried")])
            self.end()
        finally:
            os._exit(1)


def import_adaptors() -> None:
    """Import what adapts Megatron to an NPU, if it is installed, as jobs do; ReplayError if that fails."""
    given, sys.argv = sys.argv, sys.argv[:1]  # they parse all flags as their own
    try:
        for module in adaptors.before_megatron(probe.products()):
            _import_adaptor(module)
    finally:
        sys.argv = given


def _import_adaptor(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ReplayError(
            f"{module} is installed and can't be imported: {type(error).__name__}: {error}",
            expected=f"import {module}",
            got="an exception",
            cause="a Megatron-LM of another release than this one is for, or without megatron.training, or a "
            "package that it needs; npu-replay doctor says which. Take it off PYTHONPATH to try without it",
        ) from error
