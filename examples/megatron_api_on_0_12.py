"""Megatron's own RouterReplay API on a Megatron-core that has none: 0.12 to 0.15.

    pip install --no-deps megatron-core==0.12.1 einops packaging pyyaml  # where there is none
    python examples/megatron_api_on_0_12.py

`import npu_replay` is all that is added to a loop that was written for Megatron-core 0.16 or newer; there the
same file runs on Megatron's own class. For a new loop take examples/megatron_r2.py: it needs no actions, and
checks what it is given. No accelerator, some ten seconds; on a machine with GPUs set CUDA_VISIBLE_DEVICES=
first. It prints:

    Megatron 0.12.1: 3 routers recorded, RouterReplay of npu_replay
    the same weights: mismatch with replay 0, without 0.00%; largest log-prob difference 0
    other weights: mismatch with replay 0, without 14.24%; largest log-prob difference 0.042
    Megatron's own API replayed what it had recorded
"""

import npu_replay  # isort: skip  # first: it brings router_replay to a release that lacks it
import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

VOCABULARY, LENGTH, LAYERS, EXPERTS = 64, 24, 3, 8
FUSIONS = ("masked_softmax", "bias_dropout", "bias_activation", "gradient_accumulation")
UNFUSED = {f"{name}_fusion": False for name in FUSIONS}  # these kernels need an accelerator


def build():
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_enable_routing_replay=True,  # the flag of 0.16 and newer; without it a router has no RouterReplay
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        use_cpu_initialization=True,
        **UNFUSED,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")


def log_probs(model, tokens):
    places = torch.arange(LENGTH).expand_as(tokens)
    unseen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    scores = model(tokens, places, unseen).float().log_softmax(-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def update(model, tokens, targets):
    """One micro-batch under Megatron's actions: its log-probs, and what the routers showed."""
    with npu_replay.observe(model) as seen:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        RouterReplay.set_replay_data(targets)
        new = log_probs(model, tokens)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)  # for the recompute
        new.mean().backward()
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()
    return new.detach(), seen.shown[0]


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build()
    micro_batches = [torch.randint(0, VOCABULARY, (2, LENGTH)) for _ in range(2)]

    recorded, old = [], []
    for tokens in micro_batches:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            old.append(log_probs(model, tokens))
        recorded.append([ids.clone() for ids in RouterReplay.get_recorded_data()])
    RouterReplay.clear_global_router_replay_action()
    owner = RouterReplay.__module__.partition(".")[0]
    print(
        f"Megatron {megatron.core.__version__}: {len(recorded[0])} routers recorded, RouterReplay of {owner}"
    )

    about = {"layers": range(LAYERS), "num_experts": EXPERTS}  # the same as RoutedExperts, to compare
    chosen = [npu_replay.RoutedExperts(ids=torch.stack(ids, dim=1), **about) for ids in recorded]

    for weights in ("the same weights", "other weights"):
        if weights == "other weights":
            with torch.no_grad():  # stands for optimizer.step()
                for weight in model.parameters():
                    weight += 0.1 * weight.std() * torch.randn_like(weight)
        with torch.no_grad(), npu_replay.observe(model) as free:  # what the routers choose by themselves
            for tokens in micro_batches:
                log_probs(model, tokens)
        new = [update(model, *each) for each in zip(micro_batches, recorded, strict=True)]
        mismatch = npu_replay.compare(chosen, [shown for _, shown in new]).router_mismatch
        without = npu_replay.compare(chosen, free.shown).router_mismatch
        largest = (torch.stack([log_prob for log_prob, _ in new]) - torch.stack(old)).abs().max().item()
        print(
            f"{weights}: mismatch with replay {mismatch:g}, without {without:.2%}; "
            f"largest log-prob difference {largest:.2g}"
        )
        assert mismatch == 0, "the update used other experts than were recorded"
        assert largest == 0 or weights == "other weights", "the same weights and experts, other log-probs"
    assert without > 0, "the weights have moved, so replay had something to do"
    print("Megatron's own API replayed what it had recorded")
    dist.destroy_process_group()


with npu_replay.compat.cpu.lend():  # on a machine without CUDA alone: docs/dev/megatron.md
    main()
