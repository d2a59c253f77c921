"""One process of a smoke job: its device, its process groups, and how all ranks leave a feature together.

A rank that fails in the middle of a schedule leaves the others in a collective that nobody will complete.
gloo gives up there after the job's patience, and a new set of groups goes on with the next feature. NCCL and
HCCL don't give up in a way that can be caught: there `Watch` ends the job, with what is known by then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from npu_replay import devices
from npu_replay.compat import probe
from npu_replay.errors import ReplayError
from npu_replay.smoke.model import Split

Made = TypeVar("Made")


def place() -> tuple[int, int]:
    """This process's rank and their number, as torchrun says; one process without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Verdict:
    """How one feature went on one rank.

    Attributes:
        problem: empty if nothing is wrong.
        trace: where an exception came from, innermost last; empty if none was raised.
        found: what the ranks' judgement needs of this one.
        broken: an exception left the schedule, so others may wait in vain in their collectives.
        at: when it was found, in seconds; who waited in vain finds out later.
    """

    problem: str = ""
    trace: list[str] = field(default_factory=list)
    found: Any = None
    broken: bool = False
    at: float = field(default_factory=time.time)


def first_to_fail(verdicts: list[Verdict], patience: float) -> int | None:
    """The lowest rank that failed by itself, and not for having waited for another; None if none failed."""
    failed = [(rank, one.at) for rank, one in enumerate(verdicts) if one.problem]
    if not failed:
        return None
    first = min(at for _, at in failed)
    return min(rank for rank, at in failed if at - first < patience / 2)


class Wrong(Exception):
    """A feature doesn't do what it has to; said after all collectives have ended."""


class Job:
    """A started job.

    Attributes:
        rank, world: this process among them.
        device: where the model runs.
        control: a group for talking about results: gloo where there is one.
        patience: seconds that a rank waits for another.
    """

    def __init__(self, split: Split, kind: str, patience: float) -> None:
        self.split = split
        self.rank, self.world = place()
        self.patience = patience
        store = _store()
        self.store = _prefixed("smoke", store)
        self.device = self._prepared(kind)
        self.backend = devices.backend(self.device)
        self.control = self._connect(store)

    def _prepared(self, kind: str) -> torch.device:
        """This rank's device, with Megatron imported; an error of any rank is one on all of them."""
        verdict, device = Verdict(), torch.device("cpu")
        try:
            device = _device(kind)
            import_mindspeed()
            probe.require(probe.MEGATRON, "smoke")
            importlib.import_module("megatron.core.parallel_state")
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait for us
            verdict = caught(error)
        self.store.set(f"start/{self.rank}", verdict.problem)
        for rank in range(self.world):
            self.store.wait([f"start/{rank}"], timedelta(seconds=10 * self.patience))
            if problem := self.store.get(f"start/{rank}").decode():
                raise Wrong(f"rank {rank}: {problem}" if self.world > 1 else problem)
        return device

    def _connect(self, store: Any) -> Any:
        """Start torch.distributed; return the group for control."""
        # A back end that ends the process when a collective takes too long would take the report with it.
        longest = timedelta(seconds=20 * self.patience)
        dist.init_process_group(
            self.backend,
            store=_prefixed("model", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self.patience) if self.backend == "gloo" else longest,
        )
        return dist.new_group(backend="gloo", timeout=longest) if dist.is_gloo_available() else None

    def about(self) -> str:
        """One line about this job."""
        whose = "MindSpeed's and Megatron's" if "mindspeed.megatron_adaptor" in sys.modules else "Megatron's"
        return f"{whose} process groups over {self.backend}"

    def share(self, verdict: Verdict) -> list[Verdict]:
        """Every rank's verdict. All ranks come here after each feature."""
        verdicts: list[Any] = [None] * self.world
        dist.all_gather_object(verdicts, verdict, group=self.control)
        return verdicts

    def together(self, make: Callable[[], Made]) -> Made:
        """What `make` returns, if it returns on every rank; else its error on all, before any goes on."""
        made: Made | None = None
        verdict = Verdict()
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait for us
            verdict = caught(error)
        for rank, one in enumerate(self.share(verdict)):
            if one.problem:
                raise Wrong(one.problem if rank == self.rank else f"rank {rank}: {one.problem}")
        return made  # type: ignore[return-value]

    def initialise(self) -> None:
        """Make Megatron's process groups anew: those of a rank that waited in vain are of no more use."""
        timeout = self.patience if self.backend == "gloo" else 20 * self.patience
        self.split.initialise(timeout)

    def tell_mindspeed(self) -> None:
        """Give MindSpeed the arguments that it would have from the command line of a training script."""
        if "mindspeed.megatron_adaptor" in sys.modules:
            _repatch(self.split)


def _store() -> Any:
    if "RANK" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    return next(iter(dist.rendezvous("env://")))[0]  # type: ignore[attr-defined]


def _prefixed(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _device(kind: str) -> torch.device:
    found = devices.pick(kind)
    if found.type != "cpu":
        getattr(torch, found.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return found


# MindSpeed


def import_mindspeed() -> None:
    """Import MindSpeed before Megatron, if it is installed: it changes Megatron as it is imported.

    Raises:
        ReplayError: its import fails.
    """
    if not mindspeed_is_here():
        return
    given, sys.argv = sys.argv, sys.argv[:1]  # it takes every flag that it finds there for its own
    try:
        importlib.import_module("mindspeed.megatron_adaptor")
    except Exception as error:
        raise ReplayError(
            f"MindSpeed is installed and can't be imported: {type(error).__name__}: {error}",
            expected="import mindspeed.megatron_adaptor",
            got="an exception",
            cause="a Megatron-LM of another release than this MindSpeed's, or without megatron.training; "
            "npu-replay doctor says which. Take MindSpeed off PYTHONPATH to try without it",
        ) from error
    finally:
        sys.argv = given


def mindspeed_is_here() -> bool:
    return any(product.name == "mindspeed" and product.usable for product in probe.products())


def _repatch(split: Split) -> None:
    adaptor: Any = sys.modules["mindspeed.megatron_adaptor"]
    arguments: Any = importlib.import_module("mindspeed.args_utils")
    with contextlib.suppress(ModuleNotFoundError):  # a wheel of megatron-core has no megatron.training
        importlib.import_module("megatron.training.global_vars").set_args(arguments.get_mindspeed_args())
    if not hasattr(adaptor, "repatch"):
        return  # MindSpeed 2.1: what it was given when it was imported holds
    defaults = vars(arguments.get_mindspeed_args(get_defaults=True))
    adaptor.repatch(defaults | _arguments(split))


def _arguments(split: Split) -> dict[str, Any]:
    """Megatron's arguments that MindSpeed reads, as this model's config has them."""
    config = split.config()
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "moe_expert_capacity_factor",
        "moe_shared_expert_intermediate_size",
        "moe_permute_fusion",
        "tensor_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "gradient_accumulation_fusion",
        "fp8",
    )
    return {name: getattr(config, name) for name in names if hasattr(config, name)} | {
        "optimization_level": 2,
        "num_experts": split.experts,
        "gemm_gradient_accumulation_fusion": False,
        "use_gmm_fp8": False,
        "context_parallel_algo": "megatron_cp_algo",  # a piece from each end, as Megatron cuts
        "reset_position_ids": False,
        "reset_attention_mask": False,
    }


# Leaving together


class Watch:
    """Ends the job where a rank waits for one that won't come, so that the report gets out.

    Args:
        job: whose store tells of failures.
        conclude: called with the feature's name and the reason, on the thread of the watch.
    """

    def __init__(self, job: Job, conclude: Callable[[str, str], None]) -> None:
        self._job = job
        self._conclude = conclude
        self._lock = threading.Lock()
        self._name = ""
        self._number = 0
        self._deadline = float("inf")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="npu_replay smoke", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Watch over one feature, the ranks' meeting at its end included."""
        with self._lock:
            self._name, self._number = name, self._number + 1
            self._deadline = time.monotonic() + 4 * self._job.patience
        try:
            yield
        finally:
            with self._lock:
                self._deadline = float("inf")

    def failed(self, problem: str) -> None:
        """Tell the other ranks, which may be stuck in a collective, that this one won't come."""
        self._job.store.set(self._key(), f"rank {self._job.rank}: {problem}")

    def _key(self) -> str:
        return f"failed/{self._number}"

    def _run(self) -> None:
        heard = 0
        while not self._ended.wait(0.5):
            with self._lock:
                number, deadline = self._number, self._deadline
            if deadline == float("inf"):
                continue
            if heard != number and self._job.store.check([self._key()]):
                heard = number
                with self._lock:
                    if self._number == number:
                        soon = time.monotonic() + 2 * self._job.patience
                        self._deadline = deadline = min(self._deadline, soon)
            if time.monotonic() > deadline:
                reason = f"no end within {4 * self._job.patience:.0f} s: a rank waits in a collective"
                if heard == number:
                    reason = self._job.store.get(self._key()).decode()
                self._conclude(self._name, reason)
                return


def caught(error: Exception) -> Verdict:
    """The verdict of a rank on which an exception was raised."""
    problem = str(error).removeprefix("[npu_replay] ").strip()
    if not isinstance(error, (ReplayError, Wrong)):
        problem = f"{type(error).__name__}: {problem}"
    if isinstance(error, Wrong):
        return Verdict(problem)
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    trace = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
    return Verdict(problem or "no message", trace, broken=True)


def _short(filename: str) -> str:
    """The last folders of a path: the rest is nobody's business."""
    return "/".join(Path(filename).parts[-3:])
