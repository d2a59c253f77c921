"""Build the model of `npu-replay smoke`: a small MoE of the installed Megatron-core, split as a job is.

Norm and attention core are our own, since Megatron's need Transformer Engine, Apex or MindSpeed for sequence
and context parallelism. All else is the user's: routers, dispatchers, linear layers, pipeline schedules and
recompute, with MindSpeed's changes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from npu_replay.parallel import slots
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routers import Router, find
from npu_replay.routes.fingerprint import fingerprint
from npu_replay.smoke import megatron_model
from npu_replay.smoke.options import Options

TOPK = 2
BATCH = 2
"""The number of sequences of a micro-batch."""
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5}
_SOFTMAX = dict.fromkeys(_GROUPS) | dict(zip(_SIGMOID, ("softmax", False), strict=True))
"""Sets all flags, since MindSpeed fills in what a config isn't given."""
ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": _SOFTMAX,
    "sigmoid+bias": _SOFTMAX | _SIGMOID,
    "groups": _SOFTMAX | _SIGMOID | _GROUPS,
}
"""The ways of choosing experts, by the name in the report, with Megatron's flags for each."""


# The model


def config(options: Options, **changes: Any) -> Any:
    heads = max(4, 2 * options.tp)
    large = functools.partial(torch.nn.init.normal_, std=0.15)  # so that each expert changes the loss
    sizes = {
        "init_method": large,
        "output_layer_init_method": large,
        "num_layers": options.layers,
        "moe_layer_freq": [0] + [1] * (options.layers - 1),
        "num_attention_heads": heads,
        "num_query_groups": heads // 2,
        "ffn_hidden_size": 16 * math.lcm(2, options.tp),
        "moe_ffn_hidden_size": 16 * math.lcm(2, options.etp),
        "num_moe_experts": options.experts,
        "moe_router_topk": TOPK,
        "sequence_parallel": options.tp > 1,
        "pipeline_dtype": torch.float32,
        # Batched sends between two stages in both directions would mix up the tensors.
        "overlap_p2p_comm": options.vp > 1,
        "batch_p2p_comm": options.vp == 1,
        "calculate_per_token_loss": True,  # the schedule doesn't scale the loss
    }
    return megatron_model.config(**sizes | options.megatron_sizes | changes)


class Norm(nn.Module):
    """Computes RMSNorm, also with sequence parallelism, which Megatron's own refuses without Apex."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Attention(nn.Module):
    """Replaces the attention core by a function of a token and its position alone.

    So a token's loss depends on its own routes only, and context-parallel ranks exchange nothing here.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Take query, key, value [rows, batch, heads, channels]; return [rows, batch, heads * channels]."""
        heads = query.shape[2] // value.shape[2]
        return (query.tanh() * (key + value).repeat_interleave(heads, 2)).flatten(2)


@torch.no_grad()
def build(
    options: Options, routing: str, device: torch.device, *, recompute: bool = False
) -> list[nn.Module]:
    """Build this rank's chunks of the model, one a virtual stage, with the same weights at each call."""
    from megatron.core import parallel_state, tensor_parallel

    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cfg = config(options, **ROUTINGS[routing], **(megatron_model.FULL_RECOMPUTE if recompute else {}))
    # No padded sequence is longer: `multiple` has the tensor- and the context-parallel ranks in it.
    built = megatron_model.chunks(
        cfg, norm=Norm, attention=Attention, vocab=options.vocabulary, length=2 * options.multiple + 64
    )
    chunks: list[Any] = [chunk.to(device) for chunk in built]
    for name, weight in itertools.chain.from_iterable(chunk.named_parameters() for chunk in chunks):
        if "local_experts" in name:  # each rank draws the same weights for its experts
            weight.copy_(weight.roll(parallel_state.get_expert_model_parallel_rank(), -1))
    for router in routers_of(chunks) if cfg.moe_router_enable_expert_bias else ():
        bias = router.module.get_buffer("expert_bias")
        bias.copy_(0.1 * torch.randn(bias.shape))
    return chunks


def routers_of(chunks: Sequence[nn.Module]) -> list[Router]:
    return list(itertools.chain.from_iterable(find(chunks)))


# Micro-batches


@dataclass(frozen=True)
class Batch:
    """Describes one micro-batch of this rank, of a padded batch of sequences.

    Attributes:
        numbers: its sequences.
        tokens, labels: int64 [batch, rows] on the device; a label of 0 is none (padding, a last token).
        layout: the places of the tokens in the routers' rows, as npu_replay computes them.
    """

    numbers: list[int]
    tokens: torch.Tensor
    labels: torch.Tensor
    layout: TokenLayout


def plan(options: Options, parallel: ParallelLayout, device: torch.device, *, first: int = 0) -> list[Batch]:
    """Return this rank's micro-batches of its data-parallel rank's sequences of several lengths.

    They come in the order of their numbers, from `first` on.
    """
    padded = slots.rounded(13, parallel.alignment())
    count = BATCH * options.micro_batches
    generator = torch.Generator().manual_seed(5 + parallel.dp_rank)
    lengths = torch.randint(5, padded, (count,), generator=generator).tolist()
    whole = [torch.randint(1, options.vocabulary, (length,), generator=generator) for length in lengths]
    order = [*range(first, count), *range(first)]
    # A context-parallel rank has one piece from each end of a sequence.
    pieces = torch.arange(padded).chunk(2 * parallel.cp)
    places = torch.cat([pieces[parallel.cp_rank], pieces[-1 - parallel.cp_rank]])
    batches = []
    for start in range(0, count, BATCH):
        numbers = order[start : start + BATCH]
        here = [whole[number] for number in numbers]
        tokens = torch.stack([nn.functional.pad(ids, (0, padded + 1 - len(ids))) for ids in here])
        marks = [fingerprint(ids) for ids in here]
        layout = TokenLayout.padded(list(map(len, here)), padded, parallel=parallel, fingerprints=marks)
        inputs, following = (part[:, places].to(device) for part in (tokens[:, :-1], tokens[:, 1:]))
        batches.append(Batch(numbers, inputs, following, layout))
    return batches


# A step


Outcome: TypeAlias = "dict[object, torch.Tensor]"
"""A step's results on this rank: losses by sequence (last stage), gradients by chunk and weight."""


def distance(ours: Outcome, theirs: Outcome) -> float:
    """Return the largest difference, relative to the largest loss of a sequence or gradient of a weight.

    0.0 means bit-equal; infinity means not comparable, or not finite.
    """
    if ours.keys() != theirs.keys():
        return math.inf
    pairs = [(ours[name], theirs[name]) for name in theirs if theirs[name].numel()]
    apart = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs]
    return max(apart, default=0.0) if all(map(math.isfinite, apart)) else math.inf


def step(chunks: Sequence[nn.Module], batches: Sequence[Batch], *, forward_only: bool = False) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    outcome: Outcome = {}

    def forward(stream: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(stream)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        output = model(
            input_ids=batch.tokens, position_ids=positions, attention_mask=None, labels=batch.labels
        )

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            counts = batch.labels > 0
            for number, line, of_line in zip(batch.numbers, losses.detach(), counts, strict=True):
                outcome[number] = line[of_line]
            total = (losses * counts).sum() / sum(batch.layout.lengths)
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
    for number, chunk in enumerate(chunks):
        weights = dict(chunk.named_parameters())
        outcome |= {(number, name): w.grad for name, w in weights.items() if w.grad is not None}
        chunk.zero_grad()
    return outcome
