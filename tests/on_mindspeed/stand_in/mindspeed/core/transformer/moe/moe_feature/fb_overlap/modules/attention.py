"""Input norm, attention and residual: Megatron's own."""

from __future__ import annotations

from typing import Any


def attention_forward(
    self: Any,
    hidden_states: Any,
    residual: Any,
    attention_mask: Any = None,
    rotary_pos_emb: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> Any:
    """The first half of a layer."""
    attended = self.self_attention(
        self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        rotary_pos_emb=rotary_pos_emb,
        attention_bias=attention_bias,
        packed_seq_params=packed_seq_params,
    )
    with self.bias_dropout_add_exec_handler():
        add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return add(attended, residual, self.hidden_dropout)
