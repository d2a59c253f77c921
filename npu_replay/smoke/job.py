"""Run one process of a smoke job: its device, its process groups, and the exchange of results between ranks.

A rank that fails in a schedule leaves the others in a collective that will never complete. gloo gives up
after the job's patience, and the next feature gets new groups. NCCL and HCCL don't raise an error that can be
caught: there a timer ends the job, with what is known by then.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npu_replay import devices
from npu_replay.compat import probe
from npu_replay.errors import ReplayError
from npu_replay.smoke import hybrid_model
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
"""Fields of Megatron's config."""


class Wrong(ReplayError):
    """Raised when a feature doesn't work, after all of its collectives have ended."""


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from torchrun; 0 and 1 without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Job:
    """Represents one rank of a job; `device` is set by `prepare`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.world = place()
        self.device: Any = None
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if "RANK" in os.environ:
            store = next(iter(dist.rendezvous("env://")))[0]  # type: ignore[attr-defined]
        self.store = dist.PrefixStore("smoke", store)  # type: ignore[attr-defined]

    def prepare(self) -> str:
        self.device = devices.pick(self.options.device)
        if self.device.type != "cpu":
            getattr(torch, self.device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        import_mindspeed()
        probe.require(probe.MEGATRON, "smoke")
        importlib.import_module("megatron.core.parallel_state")
        return ""

    def start(self) -> str:
        """Make the process groups, and configure MindSpeed; return a line about them."""
        if self.options.model == "hybrid" and (why := hybrid_model.missing(self.options.pattern)):
            raise Wrong(f"--model hybrid: {why}")
        backend = devices.backend(self.device)
        # NCCL and HCCL end the process at their timeout, without a report: the timer must come first.
        self._timeout = self.options.patience * (1 if backend == "gloo" else 20)
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("model", self.store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self._timeout),
            )
        self.initialise()
        self.tell_mindspeed()
        whose = "MindSpeed's and Megatron's" if _ADAPTOR in sys.modules else "Megatron's"
        return f"{whose} process groups over {backend}"

    def share(self, name: str, value: Any, patience: float = math.inf) -> list[Any]:
        """Return the values that all ranks give under this name."""
        self.store.set(f"{name}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes too
        # Polled, since a wait inside the store would block the timer's thread.
        until = time.monotonic() + patience
        while not self.store.check([f"{name}/{rank}" for rank in range(self.world)]):
            Wrong.unless(time.monotonic() < until, f"no word of another rank within {patience:.0f} s")
            time.sleep(0.01)
        return self.heard(name)

    def heard(self, name: str) -> list[Any]:
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        return [pickle.loads(self.store.get(key)) for key in keys if self.store.check([key])]

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

    def leave(self) -> None:
        """Destroy all process groups, once every rank has come here.

        gloo's threads end a process with SIGABRT if it exits while they still run: on a busy machine in every
        second run of four processes.
        """
        self.share("leave", None, self.options.patience)
        if dist.is_initialized():
            dist.destroy_process_group()

    def tell_mindspeed(self) -> None:
        if _ADAPTOR not in sys.modules:
            return
        adaptor: Any = sys.modules[_ADAPTOR]
        arguments: Any = importlib.import_module("mindspeed.args_utils")
        with contextlib.suppress(ModuleNotFoundError):  # a wheel of megatron-core has no megatron.training
            importlib.import_module("megatron.training.global_vars").set_args(arguments.get_mindspeed_args())
        if hasattr(adaptor, "repatch"):  # MindSpeed 2.1 keeps the arguments from its import otherwise
            defaults = vars(arguments.get_mindspeed_args(get_defaults=True))
            about = config(self.options)
            given = {name: getattr(about, name) for name in _READ_BY_MINDSPEED if hasattr(about, name)}
            given |= {
                "optimization_level": 2,
                "num_experts": self.options.experts,
                "gemm_gradient_accumulation_fusion": False,
                "use_gmm_fp8": False,
                "context_parallel_algo": "megatron_cp_algo",  # cuts sequences as Megatron does
                "reset_position_ids": False,
                "reset_attention_mask": False,
            }
            adaptor.repatch(defaults | given)


def import_mindspeed() -> None:
    """Import MindSpeed, if it is installed, before Megatron, which it changes; ReplayError if that fails."""
    if not any(product.name == "mindspeed" and product.usable for product in probe.products()):
        return
    given, sys.argv = sys.argv, sys.argv[:1]  # it parses all flags as its own
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
