"""Full recompute by a function of MindSpeed's in the place of TransformerBlock's own (newer branches)."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel


def transformer_block_checkpointed_forward(
    self: Any,
    hidden_states: Any,
    attention_mask: Any,
    context: Any,
    context_mask: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Run the layers, `recompute_num_layers` to a checkpoint; method "block" checkpoints only the first."""
    rotary_pos_emb = named.get("rotary_pos_emb", rest[0] if rest else None)
    config = self.config
    layers = list(self.layers)
    start = 0
    while start < len(layers):
        uniform = config.recompute_method == "uniform"
        chunk = layers[start : start + (config.recompute_num_layers if uniform else 1)]

        def run(hidden: Any, mask: Any, rotary: Any, chunk: list[Any] = chunk) -> Any:
            for layer in chunk:
                hidden, _ = layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)
            return hidden

        if uniform or start < config.recompute_num_layers:
            hidden_states = tensor_parallel.checkpoint(
                run, config.distribute_saved_activations, hidden_states, attention_mask, rotary_pos_emb
            )
        else:
            hidden_states = run(hidden_states, attention_mask, rotary_pos_emb)
        start += len(chunk)
    return hidden_states
