"""A small GPTModel or HybridModel of real Megatron-core, cut over processes as training frameworks cut it.

One process builds the whole model, the others take their shards of its weights and give back their shards of
its gradients. Nothing here uses npu_replay's layouts: which token sits in which row is worked out anew, so
that it can be held against them.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from npu_replay.smoke import megatron_model
from npu_replay.smoke.model import Norm
from zoo import hybrid

VOCAB = 64
LAYERS = 4
EXPERTS = 8
TOPK = 2
EVERY = (1, 1, 1, 1)
"""moe_layer_freq with a router in every layer."""

Tensors = dict[str, torch.Tensor]
Token = tuple[int, int]
"""A sequence's number and a position in it."""


LENGTHS = (9, 5, 12, 3, 7, 10, 6, 11)
_CHANCE = torch.Generator().manual_seed(5)
SEQUENCES = [torch.randint(1, VOCAB, (length,), generator=_CHANCE) for length in LENGTHS]
"""The token ids of eight ragged sequences."""
COUNTED = sum(len(tokens) - 1 for tokens in SEQUENCES)
"""Tokens in the loss: all but the last of each sequence."""


def end_groups() -> None:
    """Destroy all process groups but that of all ranks; Megatron forgets its own, and lets them live.

    gloo has threads for each of them, which poll: with 3,000 of them both cores had nothing else to do.
    """
    gc.collect()  # engines and optimizers of the case before hold groups, too
    dist.all_reduce(torch.zeros(1))  # no barrier: it asks a stand-in of an NPU for more than that has
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a job is split, and this rank's place in it, as Megatron's parallel state says."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    ranks: dict[str, int] = field(default_factory=dict)

    def start(self, *, gloo: bool = False) -> Split:
        """Initialise Megatron's parallel state anew, and return the split with this rank's places.

        gloo: make the groups of CPUs too, which Megatron's optimizer asks for.
        """
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.destroy_model_parallel()
        end_groups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp if self.vp > 1 else None,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            distributed_timeout_minutes=1,
            create_gloo_process_groups=gloo,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        ranks = {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "etp": parallel_state.get_expert_tensor_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
        }
        return replace(self, ranks=ranks)

    @property
    def dp(self) -> int:
        return dist.get_world_size() // (self.tp * self.cp * self.pp)

    def config(self, **changes: Any) -> Any:
        """Megatron's config of the small model, split like this."""
        return megatron_model.config(
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.tp > 1,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp if self.vp > 1 else None,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            pipeline_dtype=torch.float32,
            # Two stages that talk to each other in one batch, both ways round, would mix up what they send.
            overlap_p2p_comm=self.vp > 1,
            batch_p2p_comm=self.vp == 1,
            calculate_per_token_loss=True,  # the schedule leaves the loss as it is: a sum over tokens
            **changes,
        )


# The model


class Attention(nn.Module):
    """Causal attention over padded or packed rows; each context-parallel rank gathers all keys and values."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """query, key, value [rows, batch, heads, channels], or [rows, heads, channels] when packed."""
        from megatron.core import parallel_state

        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        rows = len(query)
        ranks = parallel_state.get_context_parallel_world_size()
        first = rows * parallel_state.get_context_parallel_rank()
        places = _places(rows * ranks, ranks, packed_seq_params)
        key, value = (
            Gather.apply(tensor).repeat_interleave(query.shape[2] // tensor.shape[2], 2)
            for tensor in (key, value)
        )
        scores = torch.einsum("qbnc,kbnc->bnqk", query, key) * self.scale
        mine = places[first : first + rows, None]
        seen = (mine[..., 0] == places[:, 0]) & (mine[..., 1] >= places[:, 1])
        chances = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("bnqk,kbnc->qbnc", chances, value).flatten(2)


class Gather(torch.autograd.Function):
    """All context-parallel ranks' rows, one rank after the other."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> torch.Tensor:
        from megatron.core import parallel_state

        ctx.group = parallel_state.get_context_parallel_group()
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(everyones, mine.contiguous(), group=ctx.group)
        return torch.cat(everyones)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]


def _places(rows: int, ranks: int, packed: Any) -> torch.Tensor:
    """The sequence and the position in it of each row of all ranks, int64 [rows, 2]."""
    starts = [0, rows] if packed is None else packed.cu_seqlens_q_padded.tolist()
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    return torch.tensor(
        [
            (number, position)
            for rank in range(ranks)
            for number, length in enumerate(lengths)
            for position in share(length, ranks, rank)
        ]
    )


def share(length: int, ranks: int, rank: int) -> list[int]:
    """The positions of a sequence that one context-parallel rank has: a piece from each end."""
    if ranks == 1:
        return list(range(length))
    piece = length // (2 * ranks)
    head = rank * piece
    tail = length - (rank + 1) * piece
    return [*range(head, head + piece), *range(tail, tail + piece)]


PARTS: dict[str, Any] = {"vocab": VOCAB, "norm": Norm, "attention": Attention}
"""What a chunk is built with, of megatron_model.model."""


def build(split: Split, moe: Sequence[int] = EVERY, pattern: str = "", **changes: Any) -> list[nn.Module]:
    """This rank's chunks of the model, one for each virtual stage.

    Args:
        moe: for each decoder layer of the model's Hugging Face config 1 if it has a router, else 0.
        pattern: of a HybridModel, whose k-th E is the k-th of them; a GPTModel without one.
    """
    if not pattern:
        return megatron_model.chunks(split.config(moe_layer_freq=list(moe), **changes), **PARTS)
    config = split.config(num_layers=len(hybrid.symbols(pattern)), **changes)
    chunks = hybrid.chunks(config, pattern, norm=Norm, attention=Attention)
    for chunk in chunks:
        chunk.label_of = hybrid.labels(pattern, [layer for layer, is_moe in enumerate(moe) if is_moe])
    return chunks


def routers(chunks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """The routers, by 0-based decoder layer of the model's Hugging Face config."""
    by_layer = {}
    for chunk in chunks:
        places = {layer.layer_number - 1: getattr(layer, "mlp", None) for layer in chunk.decoder.layers}
        label_of = getattr(chunk, "label_of", None) or {place: place for place in places}
        by_layer |= {label_of[place]: mlp.router for place, mlp in places.items() if hasattr(mlp, "router")}
    return by_layer


# Its weights and gradients


def initial(chunks: Sequence[nn.Module]) -> Tensors:
    """Weights that make every choice of an expert count, for the whole model."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = 1 + 0.1 * noise if weight.dim() == 1 else 0.15 * noise
    return weights


def other_routers(weights: Tensors) -> Tensors:
    """The same weights, but routers that choose otherwise."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator) if "router" in name else weight
        for name, weight in weights.items()
    }


def load(chunks: Sequence[nn.Module], split: Split, weights: Tensors) -> None:
    with torch.no_grad():
        for name, weight, cut in _shards(chunks, split, weights):
            weight.copy_(weights[name] if cut is None else weights[name].index_select(*cut))


def gradients(chunks: Sequence[nn.Module], split: Split, weights: Tensors) -> Tensors:
    """The gradients of the whole model: the sum of what every rank has, each in its place."""
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name, weight, cut in _shards(chunks, split, weights):
        if weight.grad is not None and cut is None:
            total[name] += weight.grad
        elif weight.grad is not None:
            total[name].index_add_(*cut, weight.grad)
        weight.grad = None
    flat = torch.cat([gradient.flatten() for gradient in total.values()])
    dist.all_reduce(flat)
    pieces = flat.split([gradient.numel() for gradient in total.values()])
    return {name: piece.view_as(total[name]) for name, piece in zip(total, pieces, strict=True)}


def _shards(
    chunks: Sequence[nn.Module], split: Split, weights: Tensors
) -> Iterator[tuple[str, nn.Parameter, tuple[int, torch.Tensor] | None]]:
    """Each weight, its name in the whole model, and the dimension and places of it that are here."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            whole = _whole_name(name, chunk, split)
            yield whole, weight, _cut(whole, weights[whole].shape, weight.shape, split)


def _whole_name(name: str, chunk: nn.Module, split: Split) -> str:
    """Layers and experts are numbered from 0 in each rank's model."""

    def layer(match: re.Match[str]) -> str:
        return f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        return f"local_experts.{int(match[1]) + split.ranks['ep'] * EXPERTS // split.ep}."

    return re.sub(r"local_experts\.(\d+)\.", expert, re.sub(r"layers\.(\d+)\.", layer, name))


def _cut(name: str, whole: torch.Size, here: torch.Size, split: Split) -> tuple[int, torch.Tensor] | None:
    if whole == here:
        return None
    (dim,) = (dim for dim in range(len(whole)) if whole[dim] != here[dim])
    rank = split.ranks["etp" if "local_experts" in name else "tp"]
    if "linear_fc1" not in name:
        return dim, torch.arange(rank * here[dim], (rank + 1) * here[dim])
    half = here[dim] // 2  # gate and up projection are each cut
    gate = torch.arange(rank * half, (rank + 1) * half)
    return dim, torch.cat([gate, whole[dim] // 2 + gate])


# Micro-batches


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank.

    Attributes:
        numbers: its sequences.
        length: what each is padded to; packed: one a sequence.
        grid: the tokens of this rank, [batch][rows], None for padding.
        labels, counts: int64 and float32 [batch, rows], what is to be predicted, and whether it counts.
        packed: Megatron's description of packed sequences.
        routed: the token in each row of this rank's routers, None for padding.
    """

    numbers: tuple[int, ...]
    length: tuple[int, ...]
    grid: list[list[Token | None]]
    labels: torch.Tensor
    counts: torch.Tensor
    packed: Any
    routed: list[Token | None]

    @property
    def lengths(self) -> list[int]:
        return [len(SEQUENCES[number]) for number in self.numbers]

    def fed(self, sequences: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """What the model of this rank gets, int64 [batch, rows]: these token ids, one tensor a sequence."""
        ids = dict(
            zip(self.numbers, sequences or [SEQUENCES[number] for number in self.numbers], strict=True)
        )
        return torch.tensor(
            [[0 if token is None else int(ids[token[0]][token[1]]) for token in line] for line in self.grid]
        )


def batch(
    numbers: Sequence[int], split: Split, *, align: int, longest: int | None, packed: bool, gathers: bool
) -> Batch:
    """The micro-batch of these sequences.

    Args:
        align: pad each sequence to a multiple of this.
        longest: pad each to this length at least; packed sequences are padded each for itself.
        packed: one after the other in one row instead of a padded batch.
        gathers: routers see the rows of the whole tensor-parallel group.
    """
    least = 0 if packed else longest or max(len(SEQUENCES[number]) for number in numbers)
    padded = [-(-max(len(SEQUENCES[number]), least) // align) * align for number in numbers]
    lines = [
        [_token(number, position) for position in share(length, split.cp, split.ranks["cp"])]
        for number, length in zip(numbers, padded, strict=True)
    ]
    grid = [[token for line in lines for token in line]] if packed else lines
    wanted = [[_next(token) for token in line] for line in grid]
    part = len(grid[0]) // split.tp
    columns = range(len(grid[0]))
    if split.tp > 1 and not gathers:
        columns = range(split.ranks["tp"] * part, (split.ranks["tp"] + 1) * part)
    return Batch(
        tuple(numbers),
        tuple(padded),
        grid,
        torch.tensor([[label or 0 for label in line] for line in wanted]),
        torch.tensor([[float(label is not None) for label in line] for line in wanted]),
        _packed_params(padded) if packed else None,
        [line[column] for column in columns for line in grid],
    )


def _token(number: int, position: int) -> Token | None:
    return (number, position) if position < len(SEQUENCES[number]) else None


def _next(token: Token | None) -> int | None:
    if token is None or token[1] + 1 == len(SEQUENCES[token[0]]):
        return None
    return int(SEQUENCES[token[0]][token[1] + 1])


def _packed_params(lengths: Sequence[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


# A step


def step(
    chunks: Sequence[nn.Module], split: Split, batches: Sequence[Batch], *, forward_only: bool = False
) -> float:
    """Run Megatron's own schedule over the micro-batches; return the loss of all ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    first = batches[0]
    with torch.set_grad_enabled(not forward_only):
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=len(first.grid[0]) * split.cp,
            micro_batch_size=len(first.grid),
            forward_only=forward_only,
        )
    last = split.ranks["pp"] == split.pp - 1 and split.ranks["tp"] == 0  # the others know none, or the same
    total = torch.stack(losses).sum() if last else torch.zeros(())
    dist.all_reduce(total)
    return float(total)


def _forward(batches: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Any]:
    micro_batch = next(batches)
    tokens = micro_batch.fed()
    output = model(
        input_ids=tokens,
        position_ids=torch.arange(tokens.shape[1]).expand_as(tokens),
        attention_mask=None,
        labels=micro_batch.labels,
        packed_seq_params=micro_batch.packed,
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = (losses * micro_batch.counts).sum() / COUNTED
        return total, micro_batch.counts.sum().int(), total.detach().clone()

    return output, loss


@contextmanager
def witnessed(
    chunks: Sequence[nn.Module], *, recomputes: bool = False
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The map, bool [rows, experts], that each router puts out in forwards, and where asked in recomputes."""
    maps: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers(chunks)}

    def read(layer: int, _: nn.Module, __: Any, output: Any) -> None:
        if recomputes or torch._C._current_graph_task_id() == -1:
            maps[layer].append(output[1].detach().bool().clone())

    with ExitStack() as handles:
        for layer, router in routers(chunks).items():
            handles.callback(router.register_forward_hook(partial(read, layer)).remove)
        yield maps
