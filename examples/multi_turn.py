"""Several turns with a tool between them, sampled by a live vLLM; one sample each, replayed in training (R3).

    source ci/environment.sh && live_environment      # without a device: vLLM for CPUs, 3.5 GB, once
    python examples/multi_turn.py

Each dialogue has three turns. After a turn a tool reads what was sampled and appends its answer. Nobody
sampled these tokens, and their experts come with the next turn, whose prefill runs them. `Rollout` puts the
rows of all turns together, one row a token. The model is a small Qwen3-MoE with random weights, the
trainer is transformers in float32. With another engine only `turn` changes: docs/multi-turn.md has SGLang
over HTTP. Some fifteen seconds. Between vLLM's own lines it prints:

    2 dialogues of 3 turns: 119 tokens, 72 of them sampled, 117 with a route
    without replay: mismatch 7.26%, KL 6.0e-04, largest log-prob difference 0.18
    with R3: mismatch 0.00%, KL 1.6e-05, largest log-prob difference 0.02
    R3 took place: the trainer used the experts of every turn
"""

import os
import tempfile
from contextlib import nullcontext

import torch
import vllm
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import npu_replay
from npu_replay import Rollout, TokenLayout, Turn
from npu_replay.compat.vllm import engine_arguments

TURNS, SAMPLED = 3, 12


def small_qwen():
    sizes = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.08}
    moe = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **moe)).bfloat16()


def tool(sampled):
    """A calculator: the sum of what was sampled, digit by digit, between two tokens 400."""
    return [400, *(int(digit) for digit in str(sum(sampled))), 400]


def turn(llm, folder, tokens):
    """One call of the engine with all tokens so far: the turn, and the log-probs of what it sampled."""
    sampling = vllm.SamplingParams(max_tokens=SAMPLED, logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling)
    (routes,) = npu_replay.from_vllm(output, folder)
    sampled = list(output.outputs[0].token_ids)
    log_probs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, sampled, strict=True)]
    return Turn(prompt=tokens, sampled=sampled, routes=routes), log_probs


def dialogue(llm, folder, prompt):
    """One sample: the rollout, which of its tokens were sampled, and their log-probs."""
    rollout, was_sampled, log_probs = Rollout(folder), [False] * len(prompt), []
    tokens = prompt
    for number in range(TURNS):
        if number:
            reply = tool(rollout.tokens.tolist()[-SAMPLED:])
            rollout.append(reply)  # no rows yet: the next turn brings them
            was_sampled += [False] * len(reply)
            tokens = rollout.tokens.tolist()
        done, new = turn(llm, folder, tokens)
        rollout.extend(done)
        was_sampled += [True] * len(new)
        log_probs += new
    return rollout, torch.tensor(was_sampled), log_probs


def main():
    torch.manual_seed(1)
    model = small_qwen()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plan = {"model": folder, "enforce_eager": True, "gpu_memory_utilization": 0.3}
        wanted = engine_arguments(vllm.__version__, planned=plan, model=folder)
        os.environ |= wanted.environment
        llm = vllm.LLM(**wanted.arguments, skip_tokenizer_init=True)
        prompts = [torch.randint(0, 400, (length,)).tolist() for length in (9, 14)]
        rollouts, masks, expected = zip(*[dialogue(llm, folder, prompt) for prompt in prompts], strict=True)
    tokens = [torch.from_numpy(rollout.tokens) for rollout in rollouts]
    samples = [rollout.routes for rollout in rollouts]
    expected = torch.tensor([value for probs in expected for value in probs])
    rows = sum(int(sample.recorded.sum()) for sample in samples)
    lengths = [len(ids) for ids in tokens]
    print(f"{len(rollouts)} dialogues of {TURNS} turns: {sum(lengths)} tokens, ", end="")
    print(f"{len(expected)} of them sampled, {rows} with a route")

    batch = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True)
    counted = pad_sequence(list(masks), batch_first=True)[:, 1:]
    routes = TokenLayout.of_batch(batch, mask).gather(samples)  # routes of other tokens are refused
    model = model.float().train()

    def log_probs():
        scores = model(input_ids=batch, attention_mask=mask).logits.log_softmax(-1)
        return scores[:, :-1].gather(2, batch[:, 1:, None])[..., 0][counted]

    blocks = {"without replay": nullcontext, "with R3": lambda: npu_replay.replay(model, [routes])}
    for name, block in blocks.items():
        with torch.no_grad(), block():  # the pass over the old log-probs takes the engine's experts, too
            old = log_probs()
        with npu_replay.observe(model) as seen, block():  # observe reads the routers' outputs
            new = log_probs()
            (new - old).exp().mean().neg().backward()  # your policy gradient, of sampled tokens alone
        mismatch = npu_replay.compare([routes], seen.shown).router_mismatch
        apart = npu_replay.compare(expected, new.detach())
        largest = f"largest log-prob difference {apart.max_difference:.2f}"
        print(f"{name}: mismatch {mismatch:.2%}, KL {apart.kl:.1e}, {largest}")
    assert mismatch == 0, "the trainer used other experts than the engine"
    assert torch.equal(new, old), "the ratio of the first update is 1"
    assert rows == sum(lengths) - len(lengths), "every token has a route but the last, which no one ran"
    print("R3 took place: the trainer used the experts of every turn")


if __name__ == "__main__":
    main()
