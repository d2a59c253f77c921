"""R3 with a model of transformers under FSDP2: each rank replays the routes of its own batch.

    pip install 'transformers>=5'      # where it is missing
    torchrun --nproc-per-node 2 examples/fsdp2_r3.py

Two processes over gloo, gradient checkpointing on. There is no rollout engine here: the same weights in
bfloat16, run by transformers, stand for it. With a real one the routes come from npu_replay.from_vllm or
from_sglang, and the rest stays (docs/vllm.md). No accelerator, some twenty seconds. Rank 0 prints:

    without replay: mismatch 2.48%, KL 6.2e-05, largest log-prob difference 0.06
    with R3: mismatch 0.00%, KL 1.9e-05, largest log-prob difference 0.02
    R3 took place on 2 ranks: 0 of 808 token-layers with other experts
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import npu_replay
from npu_replay import TokenLayout

VOCABULARY = 512


def build():
    torch.manual_seed(1)  # the same weights on all ranks; your job loads a checkpoint
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        initializer_range=0.1,
    )
    return Qwen3MoeForCausalLM(config).bfloat16()


def log_probs(model, tokens, mask=None):
    scores = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def rollout(engine, lengths):
    """What a worker of the engine hands over: tokens, the sampled tokens' log-probs, routes."""
    samples = []
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (length,))
        with torch.no_grad(), npu_replay.record(engine) as recording:  # stands for from_vllm(output, config)
            sampled = log_probs(engine, tokens[None])[0]
        samples.append((tokens, sampled, recording.routes[0]))
    return samples


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = build()
    torch.manual_seed(2 + rank)
    samples = rollout(engine, [(40, 33, 27), (48, 36, 18)][rank % 2])
    tokens, sampled, routes = zip(*samples, strict=True)

    model = engine.float()
    model.gradient_checkpointing_enable()
    for layer in [*model.model.layers, model]:
        fully_shard(layer)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    batch = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True)
    rows = TokenLayout.of_batch(batch, mask).gather(routes)  # routes of other tokens are refused
    counted = mask[:, 1:].bool()
    expected = pad_sequence(sampled, batch_first=True)[counted]

    blocks = {"without replay": nullcontext, "with R3": lambda: npu_replay.replay(model, [rows])}
    for name, block in blocks.items():
        optimizer.zero_grad()
        with torch.no_grad(), block():  # the pass over the old log-probs takes the rollout's experts, too
            old = log_probs(model, batch, mask)[counted]
        with npu_replay.observe(model) as seen, block():  # observe reads the routers' outputs
            new = log_probs(model, batch, mask)[counted]
            (new - old).exp().mean().neg().backward()  # recomputes each layer, inside the block
        routing = npu_replay.compare([rows], seen.shown)
        apart = npu_replay.compare(expected, new.detach())
        counts = torch.tensor([routing.differing, routing.token_layers])
        dist.all_reduce(counts)
        if rank == 0:
            print(
                f"{name}: mismatch {counts[0] / counts[1]:.2%}, KL {apart.kl:.1e}, "
                f"largest log-prob difference {apart.max_difference:.2f}"
            )
    optimizer.step()
    assert counts[0] == 0, "the update used other experts than the rollout"
    assert torch.equal(new, old), "the ratio of the first update is 1"
    if rank == 0:
        print(
            f"R3 took place on {dist.get_world_size()} ranks: "
            f"{counts[0]} of {counts[1]} token-layers with other experts"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
