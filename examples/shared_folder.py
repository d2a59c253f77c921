"""A rollout worker writes routes into a shared folder; a trainer process reads and replays them (R3).

    pip install transformers      # where it is missing
    python examples/shared_folder.py [FOLDER]

Routes are large. So they lie in the folder, each id once (npu_replay.RouteStore), and are found there by the
tokens of a sample: the batch that goes from process to process carries none. FOLDER is one that all nodes
see; left out, a temporary one. transformers in bfloat16 stands for the rollout engine: with a real one the
routes come from npu_replay.from_vllm or from_sglang. Two processes, no accelerator, some fifteen seconds. It
prints:

    worker 16984: the routes of 4 samples are in the folder
    trainer 16985, without replay: mismatch 2.53%, KL 6.6e-05, largest log-prob difference 0.06
    trainer 16985, with R3: mismatch 0.00%, KL 2.4e-05, largest log-prob difference 0.02
    trainer 16985: replayed what the worker wrote
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
from contextlib import nullcontext

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import npu_replay
from npu_replay import RouteStore, TokenLayout

VOCABULARY, LENGTHS, PATIENCE = 512, (40, 33, 48, 27), 120  # seconds


def build(dtype):
    """The same weights in both processes, rounded to bfloat16; your job loads a checkpoint."""
    torch.manual_seed(1)
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
    return Qwen3MoeForCausalLM(config).bfloat16().to(dtype).eval()


def log_probs(model, tokens, mask=None):
    scores = model(input_ids=tokens, attention_mask=mask).logits.float().log_softmax(-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def rollout_worker(folder, to_trainer):
    """Writes each sample's routes, and sends tokens, log-probs and the name of the shard."""
    engine = build(torch.bfloat16)
    tokens, sampled = [], []
    writer = RouteStore.writer(folder, name=f"worker-{os.getpid()}")  # a name for each process that writes
    for length in LENGTHS:
        tokens.append(torch.randint(0, VOCABULARY, (length,)))
        with torch.no_grad(), npu_replay.record(engine) as recording:  # stands for from_vllm(output, config)
            sampled.append(log_probs(engine, tokens[-1][None])[0])
        writer.add(recording.routes[0].sequence(0, length, npu_replay.fingerprint(tokens[-1])))
    shard = writer.flush()  # the routes of a step; a file is there whole or not at all
    print(f"worker {os.getpid()}: the routes of {len(tokens)} samples are in the folder", flush=True)
    to_trainer.put(pickle.dumps((tokens, sampled, shard)))  # the batch


def trainer(folder, from_worker):
    """Reads the routes of its batch by their tokens, lays them out, and replays them."""
    tokens, sampled, shard = pickle.loads(from_worker.get(timeout=PATIENCE))
    store = RouteStore(folder, shard=shard)
    samples = [store.of(ids) for ids in tokens]
    fingerprints = [npu_replay.fingerprint(ids) for ids in tokens]  # routes of other tokens are refused
    layout = TokenLayout.padded(LENGTHS, max(LENGTHS), order="batch", fingerprints=fingerprints)
    routes = layout.gather(samples)
    batch = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True)
    expected = torch.nn.utils.rnn.pad_sequence(sampled, batch_first=True)

    model = build(torch.float32)
    counted = mask[:, 1:].bool()
    blocks = {"without replay": nullcontext, "with R3": lambda: npu_replay.replay(model, [routes])}
    for name, block in blocks.items():
        with torch.no_grad(), block():  # the pass over the old log-probs takes the rollout's experts, too
            old = log_probs(model, batch, mask)[counted]
        with npu_replay.observe(model) as seen, block():  # observe reads the routers' outputs
            new = log_probs(model, batch, mask)[counted]
            (new - old).exp().mean().neg().backward()  # your policy gradient
        mismatch = npu_replay.compare([routes], seen.shown).router_mismatch
        apart = npu_replay.compare(expected[counted], new.detach())
        print(
            f"trainer {os.getpid()}, {name}: mismatch {mismatch:.2%}, "
            f"KL {apart.kl:.1e}, largest log-prob difference {apart.max_difference:.2f}"
        )
    assert mismatch == 0, "the trainer used other experts than the rollout"
    assert torch.equal(new, old), "the ratio of the first update is 1"
    print(f"trainer {os.getpid()}: replayed what the worker wrote")


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = sys.argv[1] if len(sys.argv) > 1 else temporary
        context = multiprocessing.get_context("spawn")
        batches = context.Queue()
        work = [(rollout_worker, (folder, batches)), (trainer, (folder, batches))]
        processes = [
            context.Process(target=target, args=arguments, daemon=True) for target, arguments in work
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0, 0], "a process failed: see above"


if __name__ == "__main__":
    main()
