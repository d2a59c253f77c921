"""What a release of vllm-ascend does to a layer's tokens before it chooses their experts, run as released.

Its modules can't be imported without an NPU's packages. So what is wanted of them, `prepare` of each way of
communication and the gather over expert-parallel ranks, is parsed and executed by itself, in a namespace that
holds what else it names. Each rank is a thread. A step's numbers are those of `set_ascend_forward_context`.
"""

from __future__ import annotations
import __future__

import abc
import ast
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional

Result = TypeVar("Result")

LIMIT = 5
"""Seconds that a rank waits for the others."""
Comm = Literal["allgather", "mc2", "alltoall"]
PREPARES: dict[Comm, str] = {
    "allgather": "PrepareAndFinalizeWithAllGather",
    "mc2": "PrepareAndFinalizeWithMC2",
    "alltoall": "PrepareAndFinalizeWithAll2All",
}
GATHER = "_maybe_all_gather_and_maybe_unpad_impl"
SIZES = "_get_ep_local_sizes"
KEEPS_ALL = "enable_shared_expert_dp"


@dataclass(frozen=True)
class Step:
    """One forward through a layer on all ranks.

    Attributes:
        comm: the way of communication, a key of PREPARES.
        tp: the tensor-parallel ranks.
        tokens: of each data-parallel rank.
        sharded: does each tensor-parallel rank come with a part of the tokens (sequence parallelism)?
        keeps_all: is the layer called with `enable_shared_expert_dp`?
    """

    comm: Comm
    tp: int
    tokens: tuple[int, ...]
    sharded: bool = False
    keeps_all: bool = False

    @property
    def filled(self) -> int:
        """The tokens of the longest rank, with those that make its parts equal."""
        return _filled(max(self.tokens), self.tp)


@dataclass(frozen=True)
class Prepared:
    """Of one rank: how many rows came into the layer, and the tags of those that experts are chosen for."""

    entered: int
    tags: torch.Tensor


def tags(dp_rank: int, tokens: int) -> torch.Tensor:
    """A number for each token of all ranks. What fills up is 0."""
    return torch.arange(tokens) + 1000 * (dp_rank + 1)


class Release:
    """The code of one release; `folder` holds its `vllm_ascend/`."""

    def __init__(self, folder: Path) -> None:
        root = folder / "vllm_ascend"
        helpers = root / "ops" / "fused_moe" / "moe_utils.py"
        trees = [
            _definitions(root / "ops" / "register_custom_ops.py", GATHER, SIZES, "_pad_to_ep_local_size"),
            _definitions(root / "ops" / "fused_moe" / "prepare_finalize.py"),
            *([_definitions(helpers, "_pad_tokens_with_cat")] if helpers.is_file() else []),
        ]
        self._code = [_compiled(tree) for tree in trees]
        patch = root / "patch" / "worker" / "patch_routed_experts_capture.py"
        self._layout_patch = [_compiled(_definitions(patch, "capture"))] if patch.is_file() else []
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.fills_each_rank_alone = SIZES in {getattr(node, "name", "") for node in nodes}
        """Are parts those of a rank's own tokens (from 0.27 on), or of the longest rank's?"""
        self.keeps_all = KEEPS_ALL in {getattr(node, "attr", "") for node in nodes}
        """Does it heed `enable_shared_expert_dp`? 0.26 takes it without a use."""

    def prepare(self, step: Step) -> dict[tuple[int, int], Prepared]:
        """What each rank, by its data-parallel and tensor-parallel rank, chooses experts of."""
        return _on_all_ranks(step, self._prepare)

    def capture(self, step: Step) -> dict[tuple[int, int], list[int]]:
        """The tags that vllm-ascend's own patch for layouts writes into the rows of each rank's batch."""
        return _on_all_ranks(step, self._capture)

    def _prepare(self, rank: _Rank) -> Prepared:
        step, names = rank.step, rank.names
        for code in self._code:
            exec(code, names)
        rank.vllm_operators.maybe_all_gather_and_maybe_unpad = names[GATHER]
        entering = self._entering(rank)[:, None].float()
        kept = {KEEPS_ALL: True} if step.keeps_all else {}
        prepared = names[PREPARES[step.comm]](rank.moe_config).prepare(
            hidden_states=entering.clone(), router_logits=entering, replace_allreduce=step.sharded, **kept
        )
        return Prepared(len(entering), prepared.router_logits[:, 0].long())

    def _entering(self, rank: _Rank) -> torch.Tensor:
        """To 0.26 the layer before fills up and splits (`_maybe_pad_and_reduce_impl`), from 0.27 on vLLM's
        `sequence_parallel_chunk`."""
        step, own = rank.step, tags(rank.dp, rank.tokens)
        if not step.sharded:
            return own
        length = _filled(rank.tokens, step.tp) if self.fills_each_rank_alone else step.filled
        return functional.pad(own, (0, length - rank.tokens)).chunk(step.tp)[rank.tp]

    def _capture(self, rank: _Rank) -> list[int]:
        chosen = self._prepare(rank).tags
        for code in self._layout_patch:
            exec(code, rank.names)
        rows = torch.zeros(rank.tokens, 1, 1, dtype=chosen.dtype)
        capturer = SimpleNamespace(dp_rank=rank.dp, tp_size=rank.step.tp, device_buffer=rows)
        rank.names["capture"](capturer, 0, chosen[:, None])
        return [int(tag) for tag in rows.flatten()]


def _definitions(file: Path, *names: str) -> ast.Module:
    """The functions and classes of a file, all or those named, without its imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"), file)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (not names or node.name in names)
    ]
    return tree


def _compiled(tree: ast.Module) -> CodeType:
    # Annotations name products that aren't there.
    code: CodeType = compile(tree, "vllm_ascend", "exec", flags=__future__.annotations.compiler_flag)
    return code


def _filled(tokens: int, parts: int) -> int:
    return -(-tokens // parts) * parts


class _Group:
    """A process group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self._given = [torch.empty(0)] * size
        self._all_here = threading.Barrier(size, timeout=LIMIT)

    def gather(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        self._given[rank] = rows
        self._all_here.wait()
        given = list(self._given)
        self._all_here.wait()  # nobody gives again before all have read
        lengths = [len(one) for one in given]
        assert len(set(lengths)) == 1, f"a collective takes equally many rows of each rank, got {lengths}"
        return torch.cat(given)


@dataclass(frozen=True)
class _Member:
    """A group as one rank sees it."""

    group: _Group
    rank_in_group: int

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def all_gather(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        assert dim == 0
        return self.group.gather(self.rank_in_group, rows)


class _Groups:
    """The groups of a step; expert-parallel ranks are all."""

    def __init__(self, step: Step) -> None:
        dp = len(step.tokens)
        self.tensor = [_Group(step.tp) for _ in range(dp)]
        self.data = [_Group(dp) for _ in range(step.tp)]
        self.expert = _Group(dp * step.tp)


class _AnyName:
    """An enum, of which the names alone matter."""

    def __getattr__(self, name: str) -> str:
        return name


class _Rank:
    """One rank in a step, and the names that the release's code finds there."""

    def __init__(self, step: Step, dp: int, tp: int, groups: _Groups) -> None:
        self.step, self.dp, self.tp, self.tokens = step, dp, tp, step.tokens[dp]
        self._tensor = _Member(groups.tensor[dp], tp)
        self._data = _Member(groups.data[tp], dp)
        self._expert = _Member(groups.expert, dp * step.tp + tp)
        self.moe_config = SimpleNamespace(
            dp_size=len(step.tokens),
            dp_group=self._data,
            pcp_size=1,
            ep_size=self._expert.world_size,
            is_sequence_parallel=step.sharded,
        )
        self.vllm_operators = SimpleNamespace()
        self.names = self._products() | self._parallel_state() | self._forward_context()

    def _products(self) -> dict[str, Any]:
        operators = {"ops": SimpleNamespace(vllm=self.vllm_operators)}
        return {
            "ABC": abc.ABC,
            "abstractmethod": abc.abstractmethod,
            "torch": SimpleNamespace(**(vars(torch) | operators)),
            "nn": nn,
            "F": functional,
            "QuantType": _AnyName(),
            "MoEPrepareOutput": SimpleNamespace,
            "get_ascend_config": lambda: SimpleNamespace(multistream_overlap_gate=False),
            "get_dynamic_mx_quant_scale_alg": lambda: 0,
            "_PAD_ZERO_BLOCKS": {},
        }

    def _parallel_state(self) -> dict[str, Any]:
        parallel_config = SimpleNamespace(tensor_parallel_size=self.step.tp)
        return {
            "get_current_vllm_config_or_none": lambda: SimpleNamespace(parallel_config=parallel_config),
            "prefill_context_parallel_enable": lambda: False,
            "get_ep_group": lambda: self._expert,
            "get_dp_group": lambda: self._data,
            "get_pcp_group": lambda: _Member(_Group(1), 0),
            "tensor_model_parallel_all_gather": self._tensor.all_gather,
            "get_tensor_model_parallel_world_size": lambda: self.step.tp,
            "get_tensor_model_parallel_rank": lambda: self.tp,
        }

    def _forward_context(self) -> dict[str, Any]:
        step = self.step
        metadata = self._metadata() if len(step.tokens) > 1 else None
        return {
            "_EXTRA_CTX": SimpleNamespace(
                flash_comm_v1_enabled=step.sharded,
                pad_size=step.filled - self.tokens if step.sharded else 0,
                padded_length=step.filled,
                padded_num_tokens=step.filled,
                max_tokens_across_dp=max(step.tokens),
                mc2_mask=torch.ones(step.filled, dtype=torch.bool),
            ),
            "get_forward_context": lambda: SimpleNamespace(dp_metadata=metadata),
            "enable_sp": lambda: step.sharded,
            "enable_sp_by_pass": lambda: False,
        }

    def _metadata(self) -> SimpleNamespace:
        """vLLM's `DPMetadata`; its local sizes are there under sequence parallelism."""
        step = self.step
        sizes = [_filled(tokens, step.tp) // step.tp for tokens in step.tokens for _ in range(step.tp)]
        return SimpleNamespace(
            num_tokens_across_dp_cpu=torch.tensor(step.tokens),
            get_chunk_sizes_across_dp_rank=lambda: sizes if step.sharded else None,
        )


def _on_all_ranks(step: Step, work: Callable[[_Rank], Result]) -> dict[tuple[int, int], Result]:
    groups = _Groups(step)
    ranks = list(itertools.product(range(len(step.tokens)), range(step.tp)))
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = {(dp, tp): pool.submit(work, _Rank(step, dp, tp, groups)) for dp, tp in ranks}
    errors = [error for future in futures.values() if (error := future.exception())]
    if errors:  # the cause, rather than that others waited in vain
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return {rank: future.result() for rank, future in futures.items()}
