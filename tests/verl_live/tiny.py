"""A small Qwen3-MoE of random weights in a folder, with a tokenizer whose words call a tool now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo import qwen

CALLS = range(8, 16)
"""The tokens that are a whole tool call each; the model stops after one."""
VOCAB = 64
LAYERS = 3


def words() -> list[str]:
    """The vocabulary: marks of Qwen's chat template, roles, tool calls, numbers."""
    calls = [
        f'<tool_call>{{"name":"after","arguments":{{"number":{number}}}}}</tool_call>' for number in CALLS
    ]
    marks = ["<pad>", "<unk>", "<|im_end|>", "<|im_start|>", "\n", "user", "assistant", "tool"]
    return [*marks, *calls, *(f"w{number}" for number in range(len(marks) + len(calls), VOCAB))]


def tokenizer() -> Any:
    from tokenizers import AddedToken

    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    result = qwen.tokenizer(words(), **special, additional_special_tokens=["<|im_start|>"])
    result.add_tokens([AddedToken("\n", normalized=False)])
    result.chat_template = (
        "{% for message in messages %}"
        "<|im_start|> {{ message['role'] }} \n {{ message['content'] }} <|im_end|> \n "
        "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant \n {% endif %}"
    )
    return result


def save(folder: Path) -> None:
    """Everything that verl, vLLM and mbridge read of a model."""
    model = qwen.make(
        VOCAB,
        LAYERS,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        head_dim=32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,  # else its embedding is 0, and the gradient of a norm of 0 is without bound
    )
    model.generation_config.eos_token_id = [2, *CALLS]
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_prompts(path: Path, count: int) -> None:
    """Prompts for verl's dataset, every second one for the loop with tools."""
    rows = [
        {
            "data_source": "even",
            "prompt": [{"role": "user", "content": f"w{16 + n} w{20 + n} w{30 + n % 3}"}],
            "ability": "numbers",
            "reward_model": {"style": "rule", "ground_truth": "even"},
            "extra_info": {"index": n},
            "agent_name": ("single_turn_agent", "tool_agent")[n % 2],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
