"""R2 in a Megatron-core loop: the old log-probs' pass records the experts, every update replays them.

    pip install --no-deps megatron-core==0.16.1 einops packaging pyyaml  # where there is none: 0.12 to 0.19
    python examples/megatron_r2.py

A tiny GPTModel with MoE layers, four micro-batches, every layer recomputed in backward, two updates of one
batch. In the second the weights have moved, so that the routers by themselves would choose other experts.
No accelerator, some ten seconds; on a machine with GPUs set CUDA_VISIBLE_DEVICES= first. It prints:

    update 1: mismatch with replay 0, without 0.00%; largest log-prob difference 0
    update 2: mismatch with replay 0, without 40.45%; largest log-prob difference 0.43
    R2 took place: every update used the recorded experts
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import npu_replay

VOCABULARY, LENGTH, MICRO_BATCHES = 64, 24, 4
FUSIONS = ("masked_softmax", "bias_dropout", "bias_activation", "gradient_accumulation")
UNFUSED = {f"{name}_fusion": False for name in FUSIONS}  # these kernels need an accelerator


def build():
    """What your job has already. `recompute_*` runs each layer's forward again inside backward."""
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        use_cpu_initialization=True,
        **UNFUSED,
    )
    config.enable_autocast = False  # what a training script of Megatron sets
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")


def forward_step(batches, model):
    """One micro-batch: the sampled tokens' log-probs, and the policy gradient's loss."""
    batch = next(batches)
    tokens = batch["tokens"]
    places = torch.arange(LENGTH).expand_as(tokens)
    unseen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    scores = model(tokens, places, unseen).float().log_softmax(-1)
    log_probs = scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]

    def loss(output):
        ratio = (output - batch.get("old", output.detach())).exp()
        return -(ratio * batch["advantages"]).mean(), {"log_probs": output.detach()}

    return log_probs, loss


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = [
        {"tokens": torch.randint(0, VOCABULARY, (2, LENGTH)), "advantages": torch.tensor([[1.0], [-1.0]])}
        for _ in range(MICRO_BATCHES)
    ]
    loop = {
        "forward_step_func": forward_step,
        "model": model,
        "num_microbatches": MICRO_BATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": 2,
    }
    run = get_forward_backward_func()

    with torch.no_grad(), npu_replay.record(model) as recording:  # the old log-probs
        old = run(**loop, data_iterator=iter(batches), forward_only=True)
    for batch, result in zip(batches, old, strict=True):
        batch["old"] = result["log_probs"]

    for update in (1, 2):
        optimizer.zero_grad()
        with (
            npu_replay.observe(model) as seen,  # reads the routers' outputs, whoever made them
            npu_replay.replay(model, recording.routes, live_mismatch=True) as session,
        ):
            new = run(**loop, data_iterator=iter(batches))  # forward, recompute and backward
        optimizer.step()
        mismatch = npu_replay.compare(recording.routes, seen.shown).router_mismatch
        without = session.metrics()["live_mismatch"]
        largest = max(
            (a["log_probs"] - b["log_probs"]).abs().max().item() for a, b in zip(old, new, strict=True)
        )
        print(
            f"update {update}: mismatch with replay {mismatch:g}, without {without:.2%}; "
            f"largest log-prob difference {largest:.2g}"
        )
        assert mismatch == 0, "the update used other experts than the old log-probs"
        assert largest == 0 or update > 1, "before the first step old and new log-probs are the same"
    assert without > 0, "the weights have moved, so replay had something to do"
    print("R2 took place: every update used the recorded experts")
    dist.destroy_process_group()


with npu_replay.compat.cpu.lend():  # on a machine without CUDA alone: docs/dev/megatron.md
    main()
