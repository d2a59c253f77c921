"""Run npu-replay smoke: try routing replay on this stack, over these processes and on this device.

    torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --ep 2 --recompute --out smoke.json

Needs torch, numpy and a Megatron-core that can be imported, no more.

There is one way to leave: a rank whose feature fails says so, writes the report, and ends; torchrun ends the
other ranks, which may wait for it in a collective that will never complete. Of several such ranks the first
one speaks. A rank that waits for longer than `4 * patience` prints where it waits, and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_replay import devices, screen
from npu_replay.compat import probe
from npu_replay.compat.mindspeed import adaptors
from npu_replay.errors import ReplayError
from npu_replay.options import message, write_out
from npu_replay.smoke.checks import FEATURES, Trial
from npu_replay.smoke.model import ROUTINGS, config
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, PASS, Report, Result
from npu_replay.tables import print_json

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
    options.check(world)
    with screen.quiet(f"smoke-rank{rank}", name_it=rank == 0) as log:
        code = Smoke(options).run()
    if dist.is_initialized():
        if code:
            os._exit(code)  # destroying the groups would wait for ranks that wait for this one
        dist.destroy_process_group()  # gloo's threads abort a process that exits while they run
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
        self.options = options
        self._routings = routings
        self.rank, processes = _place()
        if store is None:
            store = dist.HashStore()  # type: ignore[attr-defined]
            if "RANK" in os.environ:
                store = next(iter(dist.rendezvous("env://")))[0]  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("smoke", store)  # type: ignore[attr-defined]
        self.report = Report(options, processes)
        self.device = torch.device("cpu")  # until one is chosen
        self.speaks = self.rank == 0  # or the first rank that fails

    def run(self) -> int:
        """Try one feature after the other, until one fails; report, and return the exit code."""
        with devices.one_thread(), contextlib.ExitStack() as lent:
            for feature, routing, examine in self._trials(lent):
                faulthandler.dump_traceback_later(4 * self.options.patience, exit=True, file=screen.err())
                result = self._examined(feature, routing, examine)
                faulthandler.cancel_dump_traceback_later()
                if result is None:
                    return 1
                if not self.report.results:
                    self._say(self.report.heading() + "\n")
                self.report.results.append(result)
                self._say(self.report.line(result))
                if result.result == FAIL:
                    break
        self._say(f"\n{self.report.verdict()}")
        if self.speaks:
            if self.options.json:
                print_json(self.report.to_json())
            write_out(self.options.out, self.report.to_json().encode(), force=self.options.force)
        return 0 if self.report.passed else 1

    def _trials(self, lent: contextlib.ExitStack) -> Iterator[tuple[str, str, Callable[[], str]]]:
        """Yield what is tried: a feature, a way of routing, and a function that returns what was seen."""
        yield "start", "", lambda: self._start(lent)
        for routing in self._routings:
            trial = Trial(self.options, routing, self.device)
            for feature, examine in FEATURES.items():
                if feature != "recompute" or self.options.recompute:
                    yield feature, routing, partial(examine, trial)

    def _start(self, lent: contextlib.ExitStack) -> str:
        """Choose the device, make the process groups, and configure MindSpeed."""
        self.device = self.report.device = devices.pick(self.options.device)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        import_adaptors()
        probe.require(probe.MEGATRON, "smoke")
        parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
        lent.enter_context(devices.megatron_on(self.device))
        backend = devices.backend(self.device)
        # NCCL and HCCL end the process at their timeout without a word, so faulthandler must come first.
        timeout = self.options.patience * (1 if backend == "gloo" else 20)
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("model", self.store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.report.processes,
                timeout=timedelta(seconds=timeout),
            )
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            **self.options.megatron_sizes,
            distributed_timeout_minutes=timeout / 60,
            create_gloo_process_groups=False,
        )
        if _MINDSPEED in sys.modules:
            _configure_mindspeed(self.options)
        return f"Megatron's process groups over {backend}"

    def _examined(self, feature: str, routing: str, examine: Callable[[], str]) -> Result | None:
        """Return what this rank found, once all ranks have come as far; None if another failed first."""
        try:
            why = examine()
            self.store.add(f"{feature} {routing}", 1)
            while self.store.add(f"{feature} {routing}", 0) < self.report.processes:
                if self.store.add("failed", 0):
                    return None
                time.sleep(0.01)
            return Result(feature, routing, PASS, why)
        except Exception as error:  # noqa: BLE001  whatever fails here is the finding
            self.speaks = self.store.add("failed", 1) == 1
            whose = "" if isinstance(error, ReplayError) else f"{type(error).__name__}: "
            why = " ".join(f"{whose}{message(error)}".split())
            trace = [  # only the last folders of a path, for privacy
                f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)[-6:]
            ]
            return Result(feature, routing, FAIL, why, self.rank, trace) if self.speaks else None

    def _say(self, text: str) -> None:
        if self.speaks:
            to = screen.err() if self.options.json else screen.out()
            to.write(text + "\n")
            to.flush()


def _configure_mindspeed(options: Options) -> None:
    adaptor: Any = sys.modules[_MINDSPEED]
    arguments: Any = importlib.import_module("mindspeed.args_utils")
    with contextlib.suppress(ModuleNotFoundError):  # a wheel of megatron-core has no megatron.training
        importlib.import_module("megatron.training.global_vars").set_args(arguments.get_mindspeed_args())
    if hasattr(adaptor, "repatch"):  # MindSpeed 2.1 keeps the arguments from its import otherwise
        about = config(options)
        values = {name: getattr(about, name) for name in _READ_BY_MINDSPEED if hasattr(about, name)}
        values |= {
            "optimization_level": 2,
            "num_experts": options.experts,
            "gemm_gradient_accumulation_fusion": False,
            "use_gmm_fp8": False,
            "context_parallel_algo": "megatron_cp_algo",  # cuts sequences as Megatron does
            "reset_position_ids": False,
            "reset_attention_mask": False,
        }
        adaptor.repatch(vars(arguments.get_mindspeed_args(get_defaults=True)) | values)


def import_adaptors() -> None:
    """Import what adapts Megatron to an NPU, if it is installed, as jobs do."""
    modules = adaptors.before_megatron(probe.products())
    command_line = sys.argv  # they parse all flags as their own
    sys.argv = sys.argv[:1]
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        sys.argv = command_line
