"""The model of `npu-replay smoke`: a small MoE of the Megatron-core that is here, split as a job is split.

Norm and attention core are the test's own: for sequence and context parallelism Megatron's need Transformer
Engine, Apex or MindSpeed. All else is the user's: routers, dispatchers, linear layers, pipeline schedules and
recompute, with whatever MindSpeed has put in their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routers import Router, find
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.smoke import hybrid_model, megatron_model
from npu_replay.smoke.options import Split

TOPK = 2
BATCH = 2
"""Sequences of a micro-batch."""

Token: TypeAlias = "tuple[int, int]"
"""A sequence's number and a position in it."""


@dataclass(frozen=True)
class Routing:
    """One way of choosing experts.

    Attributes:
        name: as the report names it.
        config: Megatron's flags for it.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def flags(self) -> dict[str, Any]:
        """Its flags, and the defaults of the other ways': MindSpeed fills in what a config isn't given."""
        names = {name for routing in ROUTINGS for name in routing.config}
        known = {name: default for name, default in _config_defaults().items() if name in names}
        return known | self.config

    def missing(self) -> str:
        """Why this release of Megatron can't route like that; empty if it can."""
        lacking = sorted(self.config.keys() - _config_defaults().keys())
        return f"this Megatron has no {', '.join(lacking)}" if lacking else ""


def _config_defaults() -> dict[str, Any]:
    """Return the fields of Megatron's config, and their defaults."""
    from megatron.core.transformer import TransformerConfig

    return {one.name: one.default for one in dataclasses.fields(TransformerConfig)}


_BIAS = "moe_router_enable_expert_bias"
_SIGMOID = {"moe_router_score_function": "sigmoid", _BIAS: True}
_GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
ROUTINGS = (
    Routing("softmax"),
    Routing("sigmoid+bias", _SIGMOID),
    Routing("groups", _SIGMOID | _GROUPS),
)


# The model


def config(split: Split, **changes: Any) -> Any:
    """A TransformerConfig of the model."""
    heads, hybrid = max(4, 2 * split.tp), split.model == "hybrid"
    sizes = {
        "num_layers": split.layers * (2 if hybrid else 1),  # a HybridModel's are halves of a GPTModel's
        "moe_layer_freq": 1 if hybrid else [0] + [1] * (split.layers - 1),
        "num_attention_heads": heads,
        "num_query_groups": heads // 2,
        "ffn_hidden_size": 16 * math.lcm(2, split.tp),
        "moe_ffn_hidden_size": 16 * math.lcm(2, split.etp),
        "num_moe_experts": split.experts,
        "moe_router_topk": TOPK,
        "sequence_parallel": split.tp > 1,
        "pipeline_dtype": torch.float32,
        # Two stages that talk to each other in one batch, both ways round, would mix up what they send.
        "overlap_p2p_comm": split.vp > 1,
        "batch_p2p_comm": split.vp == 1,
        "calculate_per_token_loss": True,  # the schedule leaves the loss as it is: a sum over tokens
    }
    return megatron_model.config(**sizes | split.megatron_sizes | changes)


class Norm(nn.Module):
    """RMSNorm that may be used with sequence parallelism; Megatron's own without Apex refuses it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Attention(nn.Module):
    """In the place of an attention core: a function of a token and of its position alone.

    So a token's loss tells of its own routes, and context-parallel ranks need nothing of each other here.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """query, key, value [rows, batch, heads, channels]; returns [rows, batch, heads * channels]."""
        heads = query.shape[2] // value.shape[2]
        return (query.tanh() * (key + value).repeat_interleave(heads, 2)).flatten(2)


def share(length: int, ranks: int, rank: int) -> list[int]:
    """The positions of a sequence that one context-parallel rank has: a piece from each end.

    >>> share(8, 2, 0), share(8, 2, 1)
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    if ranks == 1:
        return list(range(length))
    piece = length // (2 * ranks)
    head, tail = rank * piece, length - (rank + 1) * piece
    return [*range(head, head + piece), *range(tail, tail + piece)]


def build(
    split: Split, routing: Routing, device: torch.device, *, recompute: bool = False
) -> list[nn.Module]:
    """This rank's chunks of the model, one for each virtual stage; the same weights at each call."""
    about: dict[str, Any] = {"vocab": split.vocabulary, "norm": Norm, "attention": Attention}
    again = megatron_model.FULL_RECOMPUTE
    if split.model == "hybrid":
        again = hybrid_model.recompute()
        about |= {"build": hybrid_model.model, "pattern": split.pattern}
    cfg = config(split, **routing.flags(), **(again if recompute else {}))
    built = megatron_model.chunks(cfg, length=8 * split.alignment + 64, **about)
    chunks: list[nn.Module] = [chunk.to(device) for chunk in built]
    _fill(chunks, routing)
    return chunks


def routers_of(chunks: Sequence[nn.Module]) -> list[Router]:
    """All routers of this rank."""
    return list(itertools.chain.from_iterable(find(chunks)))


def _fill(chunks: Sequence[nn.Module], routing: Routing) -> None:
    """Weights that make every choice of an expert count; the same on all ranks that hold the same part."""
    with torch.no_grad():
        for chunk in chunks:
            for name, weight in chunk.named_parameters():
                noise = _noise(_identity(name, weight, chunk), weight)
                weight.copy_(1 + 0.1 * noise if weight.dim() == 1 else 0.15 * noise)
        for router in routers_of(chunks) if _BIAS in routing.config else ():
            bias = router.module.get_buffer("expert_bias")
            bias.copy_(0.1 * _noise(f"bias {router.label}", bias))


def _identity(name: str, weight: nn.Parameter, chunk: Any) -> str:
    """Which part of the whole model this is; layers and experts are numbered from 0 on each rank."""
    from megatron.core import parallel_state

    def layer(found: re.Match[str]) -> str:
        return f"layers.{chunk.decoder.layers[int(found[1])].layer_number}."

    expert = "local_experts" in name
    place = f" ep {parallel_state.get_expert_model_parallel_rank()}" if expert else ""
    if getattr(weight, "tensor_model_parallel", False):
        ask = "expert_tensor_parallel" if expert else "tensor_model_parallel"
        place += f" tp {getattr(parallel_state, f'get_{ask}_rank')()}"
    return re.sub(r"layers\.(\d+)\.", layer, name) + place


def _noise(seed: str, like: torch.Tensor) -> torch.Tensor:
    """Normal noise on the CPU, the same for the same seed on every machine."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(like.shape, generator=generator).to(like.dtype)


@contextlib.contextmanager
def perturbed(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Other router weights for the length of the block: they choose otherwise for many tokens."""
    kept = []
    with torch.no_grad():
        for router in routers_of(chunks):
            weight: Any = router.module.weight
            kept.append((weight, weight.detach().clone()))
            weight.add_((0.3 * _noise(f"perturbed {router.label}", weight)).to(weight.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


# Micro-batches


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank, of a padded batch of sequences.

    Attributes:
        numbers: its sequences.
        places: the positions that this rank has of each, context parallelism taken off.
        tokens, labels: int64 [batch, rows] on the device; a label of 0 is none.
        layout: where npu_replay says that the tokens sit in the routers' rows.
    """

    numbers: list[int]
    places: list[int]
    tokens: torch.Tensor
    labels: torch.Tensor
    layout: TokenLayout


def plan(split: Split, parallel: ParallelLayout, device: torch.device, *, other: bool = False) -> list[Batch]:
    """This rank's micro-batches of its data-parallel rank's ragged sequences.

    Args:
        other: the same sequences in another order, and padded further.
    """
    padded, count = split.alignment * -(-13 // split.alignment), BATCH * split.micro_batches
    generator = torch.Generator().manual_seed(5 + parallel.dp_rank)
    lengths = torch.randint(5, padded, (count,), generator=generator).tolist()
    whole = [torch.randint(1, split.vocabulary, (length,), generator=generator) for length in lengths]
    order = list(range(count))
    if other:
        order = [*order[:0:-1], 0]
        padded += 2 * split.alignment
    batches = []
    for first in range(0, count, BATCH):
        numbers = order[first : first + BATCH]
        here = [whole[number] for number in numbers]
        tokens = torch.stack([nn.functional.pad(ids, (0, padded + 1 - len(ids))) for ids in here])
        places = share(padded, parallel.cp, parallel.cp_rank)
        marks = [fingerprint(ids) for ids in here]
        layout = TokenLayout.padded(list(map(len, here)), padded, parallel=parallel, fingerprints=marks)
        given, following = (part[:, places].to(device) for part in (tokens[:, :-1], tokens[:, 1:]))
        batches.append(Batch(numbers, places, given, following, layout))
    return batches


# A step


@dataclass
class Outcome:
    """What a step gave on this rank: the loss of each token (last stage), and the gradient of each weight."""

    losses: dict[Token, float] = field(default_factory=dict)
    gradients: list[torch.Tensor] = field(default_factory=list)

    def problem(self) -> str:
        """Why these can't be the numbers of a training step; empty if they can."""
        if not all(math.isfinite(loss) for loss in self.losses.values()):
            return "a loss is not finite"
        if not all(bool(torch.isfinite(gradient).all()) for gradient in self.gradients):
            return "a gradient is not finite"
        return ""

    def distance(self, other: Outcome) -> float:
        """The largest difference of a loss, or of a gradient relative to the largest of its weight; 0.0 means
        to the last bit, infinite that they can't be compared."""
        apart = losses_apart(self.losses, other.losses)
        if len(self.gradients) != len(other.gradients):
            return math.inf
        for ours, theirs in zip(self.gradients, other.gradients, strict=True):
            largest = max(float(theirs.abs().max()), 1e-6)
            apart = max(apart, float((ours - theirs).abs().max()) / largest)
        return apart if math.isfinite(apart) else math.inf


def losses_apart(ours: dict[Token, float], theirs: dict[Token, float]) -> float:
    """The largest difference of a token's loss; infinite if these aren't the same tokens."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max((abs(loss - theirs[token]) for token, loss in ours.items()), default=0.0)


def step(chunks: Sequence[nn.Module], batches: Sequence[Batch], *, forward_only: bool = False) -> Outcome:
    """Run Megatron's own schedule over the micro-batches."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    for weight in weights:
        weight.grad = None
    found = Outcome()

    def forward(stream: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Any]:
        one = next(stream)
        positions = torch.arange(one.tokens.shape[1], device=one.tokens.device)
        output = model(
            input_ids=one.tokens,
            position_ids=positions.expand_as(one.tokens),
            attention_mask=None,
            labels=one.labels,
        )

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            for number, size, line in zip(one.numbers, one.layout.lengths, losses.tolist(), strict=True):
                for place, value in zip(one.places, line, strict=True):
                    if place < size - 1:  # the last token predicts nothing
                        found.losses[number, place] = value
            counts = one.labels > 0
            total = (losses * counts).sum() / sum(one.layout.lengths)
            return total, counts.sum().int(), total.detach().clone()

        return output, loss

    with torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1] * parallel_state.get_context_parallel_world_size(),
            micro_batch_size=len(batches[0].tokens),
            forward_only=forward_only,
        )
    found.gradients = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights:
        weight.grad = None
    return found
