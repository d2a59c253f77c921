"""Four families: tiny random models of transformers, and which experts they choose, by transformers alone.

Nothing of npu_replay is used here: this is the truth that an engine's rows are held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from zoo import qwen

VOCABULARY = 512
LONGEST = 1024
MARGIN = 1e-3
"""Scores that are this near count as a tie: the engine adds up in another order, and may take either. Of
those that fell otherwise in 4 million token-layers, the farthest were 3e-4 apart."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,  # wide enough to route by
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_hidden_layers": 7,
        "head_dim": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
    },
    "Mixtral": {"num_hidden_layers": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": {"num_hidden_layers": 5, "num_experts": 64, "num_experts_per_tok": 8},
    "DeepseekV3": {
        "num_hidden_layers": 7,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "rope_interleave": True,
        # By these vLLM tells that there is a bias, and which scores; transformers knows no other.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
FAMILIES = tuple(_SHAPES)


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a family with random weights, float32."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(_SIZES | _SHAPES[family] | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.1 * torch.randn(bias.shape))
    return model


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids, none of which ends a text."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def save(model: Any, folder: Path) -> Path:
    """As engines load it, with a tokenizer."""
    model.save_pretrained(folder)
    # One word a token, «w17»; a chat is its messages' words between w1 and w2.
    words = qwen.tokenizer((f"w{number}" for number in range(VOCABULARY)), unk_token="w0")
    words.chat_template = "{% for one in messages %}w1 {{ one.content }} {% endfor %}w2"
    words.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Truth:
    """Which experts a model chooses for each token of a sequence, and where it is undecided.

    Attributes:
        ids: [tokens, MoE layers, topk], sorted.
        tie: [tokens, MoE layers] bool: the last chosen and the first left out are nearer than MARGIN.
    """

    ids: np.ndarray[Any, Any]
    tie: np.ndarray[Any, Any]


class _Took(TorchFunctionMode):
    """Routers that took these experts for the rows from `start` on, whatever they would choose.

    So what the layers behind them choose is judged where an engine took the other side of a tie, too.
    """

    def __init__(self, config: Any, taken: np.ndarray[Any, Any], start: int) -> None:
        super().__init__()
        self._experts = getattr(config, "num_local_experts", None) or config.num_experts
        self._rows = slice(start, start + len(taken))
        self._layers = iter(torch.as_tensor(taken.astype(np.int64)).unbind(1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return output
        indices = output.indices
        indices[self._rows] = next(self._layers)
        return torch.return_types.topk((args[0].gather(1, indices), indices))


def truth(
    model: Any, tokens: Sequence[int], taken: np.ndarray[Any, Any] | None = None, start: int = 0
) -> Truth:
    """From the router logits of one forward over the whole sequence.

    Args:
        taken: [rows, MoE layers, topk], the experts that the rows from `start` on went to. By default those
            that the model chooses.
    """
    config = model.config
    topk = config.num_experts_per_tok
    took = nullcontext() if taken is None else _Took(config, taken, start)
    with torch.inference_mode(), took:
        out = model.model(torch.tensor([list(tokens)]), use_cache=False, output_router_logits=True)
    chosen = []
    ties = []
    biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for number, logits in enumerate(out.router_logits):
        scores = logits.reshape(len(tokens), -1).float()
        tie = torch.zeros(len(tokens), dtype=torch.bool)
        if biases:  # DeepSeek-V3: sigmoid, a bias, and the best groups by the sum of their two best
            scores = scores.sigmoid() + biases[number]
            groups = scores.unflatten(1, (config.n_group, -1)).topk(2).values.sum(2)
            tie |= _gap(groups, config.topk_group) < MARGIN
            kept = torch.zeros_like(groups).scatter(1, groups.topk(config.topk_group).indices, 1)
            kept = kept.repeat_interleave(scores.shape[1] // config.n_group, dim=1)
            scores = scores.masked_fill(kept == 0, -torch.inf)
        tie |= _gap(scores, topk) < MARGIN
        chosen.append(scores.topk(topk).indices.sort().values)
        ties.append(tie)
    return Truth(torch.stack(chosen, 1).numpy(), torch.stack(ties, 1).numpy())


def _gap(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Between the last that is taken and the first that isn't."""
    if scores.shape[1] == topk:
        return torch.full(scores.shape[:1], torch.inf)
    best = scores.topk(topk + 1).values
    return best[:, topk - 1] - best[:, topk]
