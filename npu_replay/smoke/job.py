"""One process of a smoke job: its device, its process groups, and how all ranks leave a feature together.

A rank that fails in the middle of a schedule leaves the others in a collective that nobody will complete.
gloo gives up there after the job's patience, and a new set of groups goes on with the next feature. NCCL and
HCCL don't give up in a way that can be caught: there a timer ends the job, with what is known by then.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from npu_replay import devices
from npu_replay.compat import probe
from npu_replay.errors import ReplayError
from npu_replay.options import message
from npu_replay.smoke.model import config
from npu_replay.smoke.options import Options

_ADAPTOR = "mindspeed.megatron_adaptor"
_READ_BY_MINDSPEED = (
    *("num_layers", "hidden_size", "num_attention_heads", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_expert_capacity_factor"),
    *("moe_shared_expert_intermediate_size", "moe_permute_fusion", "tensor_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "sequence_parallel", "gradient_accumulation_fusion", "fp8"),
)
"""Of Megatron's config."""


class Wrong(ReplayError):
    """A feature doesn't do what it has to; said after all collectives have ended."""


def place() -> tuple[int, int]:
    """Return this process's rank and their number, as torchrun says; one process without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Verdict:
    """How one feature went on one rank.

    Attributes:
        problem: empty if nothing is wrong.
        trace: where an exception came from, innermost last; empty if none was raised.
        found: what it saw, for the other ranks.
        broken: an exception left the schedule, so others may wait in vain in their collectives.
        at: when it was found, in seconds; who waited in vain finds out after it.
    """

    problem: str = ""
    trace: list[str] = field(default_factory=list)
    found: Any = None
    broken: bool = False
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: Exception) -> Verdict:
        """Return the verdict of a rank on which an exception was raised."""
        if isinstance(error, Wrong):
            return cls(message(error))
        whose = "" if isinstance(error, ReplayError) else f"{type(error).__name__}: "
        # Of a path the last folders: the rest is nobody's business.
        trace = [
            f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        ]
        return cls(f"{whose}{message(error)}".strip() or "no message", trace, broken=True)


def first_to_fail(verdicts: list[Verdict], patience: float) -> int | None:
    """Return the lowest rank that failed by itself, and not for having waited for another; None if none did.

    >>> first_to_fail([Verdict("timed out", at=60.0), Verdict(), Verdict("no memory", at=1.0)], patience=60.0)
    2
    """
    failed = [(rank, one.at) for rank, one in enumerate(verdicts) if one.problem]
    first = min((at for _, at in failed), default=0.0)
    return min((rank for rank, at in failed if at - first < patience / 2), default=None)


class Job:
    """A started job.

    Attributes:
        rank, world: this process among them.
        device: where the model runs.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.world = place()
        # A back end that ends the process when a collective takes too long would take the report with it.
        longest = 20 * options.patience
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if "RANK" in os.environ:
            store = next(iter(dist.rendezvous("env://")))[0]  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("smoke", store)  # type: ignore[attr-defined]
        self.device = self._prepared()
        self.backend = devices.backend(self.device)
        self._timeout = options.patience if self.backend == "gloo" else longest
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("model", store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self._timeout),
        )
        self._control = None  # a group for talking about results: gloo where there is one
        if dist.is_gloo_available():
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest))

    def _prepared(self) -> torch.device:
        """Pick this rank's device and import Megatron; an error of any rank is one on all of them."""
        verdict, device = Verdict(), torch.device("cpu")
        try:
            device = devices.pick(self.options.device)
            if device.type != "cpu":
                getattr(torch, device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
            import_mindspeed()
            probe.require(probe.MEGATRON, "smoke")
            importlib.import_module("megatron.core.parallel_state")
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait for us
            verdict = Verdict.of(error)
        self.store.set(f"start/{self.rank}", verdict.problem)
        for rank in range(self.world):
            self.store.wait([f"start/{rank}"], timedelta(seconds=10 * self.options.patience))
            if problem := self.store.get(f"start/{rank}").decode():
                raise Wrong(f"rank {rank}: {problem}" if self.world > 1 else problem)
        return device

    def about(self) -> str:
        """Return one line about this job."""
        whose = "MindSpeed's and Megatron's" if _ADAPTOR in sys.modules else "Megatron's"
        return f"{whose} process groups over {self.backend}"

    def share(self, verdict: Verdict) -> list[Verdict]:
        """Return every rank's verdict. All ranks come here after each feature."""
        verdicts: list[Any] = [None] * self.world
        dist.all_gather_object(verdicts, verdict, group=self._control)
        return verdicts

    def initialise(self) -> None:
        """Make Megatron's process groups anew: those of a rank that waited in vain are of no more use."""
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            **self.options.megatron_sizes,
            distributed_timeout_minutes=self._timeout / 60,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def leave(self) -> None:
        """Destroy all process groups, once every rank has come here.

        gloo's threads end a process with SIGABRT if it exits while they still run: on a busy machine in every
        second run of four processes.
        """
        dist.barrier(group=self._control)
        dist.destroy_process_group()

    def tell_mindspeed(self) -> None:
        """Give MindSpeed the arguments that it would have from the command line of a training script."""
        if _ADAPTOR not in sys.modules:
            return
        adaptor: Any = sys.modules[_ADAPTOR]
        arguments: Any = importlib.import_module("mindspeed.args_utils")
        with contextlib.suppress(ModuleNotFoundError):  # a wheel of megatron-core has no megatron.training
            importlib.import_module("megatron.training.global_vars").set_args(arguments.get_mindspeed_args())
        if hasattr(adaptor, "repatch"):  # MindSpeed 2.1: what it was given when it was imported holds
            defaults = vars(arguments.get_mindspeed_args(get_defaults=True))
            about = config(self.options)
            given = {name: getattr(about, name) for name in _READ_BY_MINDSPEED if hasattr(about, name)}
            given |= {
                "optimization_level": 2,
                "num_experts": self.options.experts,
                "gemm_gradient_accumulation_fusion": False,
                "use_gmm_fp8": False,
                "context_parallel_algo": "megatron_cp_algo",  # a piece from each end, as Megatron cuts
                "reset_position_ids": False,
                "reset_attention_mask": False,
            }
            adaptor.repatch(defaults | given)


def import_mindspeed() -> None:
    """Import MindSpeed before Megatron, if it is installed: it changes Megatron as it is imported.

    Raises:
        ReplayError: its import fails.
    """
    if not any(product.name == "mindspeed" and product.usable for product in probe.products()):
        return
    given, sys.argv = sys.argv, sys.argv[:1]  # it takes every flag that it finds there for its own
    try:
        importlib.import_module(_ADAPTOR)
    except Exception as error:
        raise ReplayError(
            f"MindSpeed is installed and can't be imported: {type(error).__name__}: {error}",
            expected=f"import {_ADAPTOR}",
            got="an exception",
            cause="a Megatron-LM of another release than this MindSpeed's, or without megatron.training; "
            "npu-replay doctor says which. Take MindSpeed off PYTHONPATH to try without it",
        ) from error
    finally:
        sys.argv = given
