"""R3 from vLLM to Megatron-core: a live vLLM samples in bfloat16, Megatron replays its experts in float32.

    source ci/environment.sh && live_environment      # without a device: vLLM for CPUs, 3.5 GB, once
    PYTHONPATH=.work/megatron/0.12.1 python examples/vllm_to_megatron_r3.py

The model is a small Qwen3-MoE with random weights. For a real one `folder` is its path, `plan` has your own
arguments (tensor_parallel_size=8), prompts are text, skip_tokenizer_init goes, your trainer builds `model`,
and on several ranks the layout takes parallel=ParallelLayout.from_megatron(model). It prints:

    vLLM 0.30.0: 8 completions with routes
    without replay: mismatch 6.55%, KL 9.6e-04, largest log-prob difference 0.29
    with R3: mismatch 0.00%, KL 2.1e-05, largest log-prob difference 0.02
    R3 took place: Megatron used the experts that vLLM used
"""

import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import vllm
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import npu_replay
from npu_replay.compat.vllm import engine_arguments

ENDS = {"embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm"}
ENDS |= {"output_layer": "lm_head"}  # Megatron's name of a weight, and transformers'
LAYER = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
LAYER |= {f"self_attention.{name}_layernorm": f"self_attn.{name}_norm" for name in "qk"}
LAYER |= {"self_attention.linear_proj": "self_attn.o_proj", "mlp.router": "mlp.gate"}


def megatron_like(qwen):
    """The same weights in Megatron, in float32, with full recompute."""
    its, theirs = qwen.config, qwen.float().state_dict()
    sizes = {"num_layers": its.num_hidden_layers, "hidden_size": its.hidden_size, "kv_channels": its.head_dim}
    heads = {"num_attention_heads": its.num_attention_heads, "num_query_groups": its.num_key_value_heads}
    experts = {"num_moe_experts": its.num_experts, "moe_router_topk": its.num_experts_per_tok}
    form = {"normalization": "RMSNorm", "layernorm_epsilon": its.rms_norm_eps, "qk_layernorm": True}
    form |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
    form |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": its.moe_intermediate_size}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fusions = ("masked_softmax", "bias_dropout", "bias_activation", "gradient_accumulation")
    cpu = {"use_cpu_initialization": True} | {f"{name}_fusion": False for name in fusions}
    config = TransformerConfig(**sizes, **heads, **experts, **form, **recompute, **cpu)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    rotary = {"position_embedding_type": "rope", "rotary_base": int(its.rope_parameters["rope_theta"])}
    model = GPTModel(config, spec, its.vocab_size, its.max_position_embeddings, **rotary)

    ours = {f"{name}.weight": theirs[f"{other}.weight"] for name, other in ENDS.items()}
    for layer in range(its.num_hidden_layers):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        ours |= {f"{here}{name}.weight": theirs[f"{there}{other}.weight"] for name, other in LAYER.items()}
        parts = [theirs[f"{there}self_attn.{name}_proj.weight"] for name in "qkv"]  # a group's lie together
        groups = [part.view(its.num_key_value_heads, -1, its.hidden_size) for part in parts]
        ours[f"{here}self_attention.linear_qkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1)
        for name, other in {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}.items():
            for expert, weight in enumerate(theirs[f"{there}mlp.experts.{other}"]):
                ours[f"{here}mlp.experts.local_experts.{expert}.{name}.weight"] = weight
    assert not model.load_state_dict(ours, strict=False).unexpected_keys
    return model


def main():
    torch.manual_seed(1)
    sizes = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.08}
    moe = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    qwen = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **moe)).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        qwen.save_pretrained(folder)
        plan = {"model": folder, "enforce_eager": True, "gpu_memory_utilization": 0.3}
        wanted = engine_arguments(vllm.__version__, planned=plan, model=folder)
        os.environ |= wanted.environment
        llm = vllm.LLM(**wanted.arguments, skip_tokenizer_init=True)
        prompts = [{"prompt_token_ids": torch.randint(0, 512, (8 + 3 * row,)).tolist()} for row in range(4)]
        tokens, samples, sampled, response = [], [], [], []
        for output in llm.generate(prompts, vllm.SamplingParams(n=2, max_tokens=40, logprobs=0)):
            for done, routes in zip(output.outputs, npu_replay.from_vllm(output, folder), strict=True):
                tokens.append(torch.tensor([*output.prompt_token_ids, *done.token_ids]))
                samples.append(routes)
                sampled += [step[done.token_ids[at]].logprob for at, step in enumerate(done.logprobs)]
                response.append(torch.arange(len(tokens[-1])) >= len(output.prompt_token_ids))
    print(f"vLLM {vllm.__version__}: {len(samples)} completions with routes")
    if not dist.is_initialized():  # vLLM may have done so in this process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = megatron_like(qwen)

    batch, lengths = pad_sequence(tokens, batch_first=True), [len(ids) for ids in tokens]
    places = torch.arange(batch.shape[1]).expand_as(batch)
    unseen = torch.ones(batch.shape[1], batch.shape[1], dtype=torch.bool).triu(1)[None, None]
    counted = pad_sequence(response, batch_first=True)[:, 1:]
    fingerprints = [npu_replay.fingerprint(ids) for ids in tokens]  # routes of other tokens are refused
    rows = npu_replay.TokenLayout.padded(lengths, batch.shape[1], fingerprints=fingerprints).gather(samples)

    def log_probs():
        scores = model(batch, places, unseen).float().log_softmax(-1)
        return scores[:, :-1].gather(2, batch[:, 1:, None])[..., 0][counted]

    blocks = {"without replay": nullcontext, "with R3": lambda: npu_replay.replay(model, [rows])}
    for name, block in blocks.items():
        with torch.no_grad(), block():  # the pass over the old log-probs takes the engine's experts, too
            old = log_probs()
        with npu_replay.observe(model) as seen, block():  # observe reads the routers' outputs
            new = log_probs()
            (new - old).exp().mean().neg().backward()  # your policy gradient; recomputes each layer
        mismatch = npu_replay.compare([rows], seen.shown).router_mismatch
        apart = npu_replay.compare(torch.tensor(sampled), new.detach())
        largest = f"largest log-prob difference {apart.max_difference:.2f}"
        print(f"{name}: mismatch {mismatch:.2%}, KL {apart.kl:.1e}, {largest}")
    assert mismatch == 0, "Megatron used other experts than vLLM"
    assert torch.equal(new, old), "the ratio of the first update is 1"
    print("R3 took place: Megatron used the experts that vLLM used")


if __name__ == "__main__":  # vLLM's engine process imports this file
    with npu_replay.compat.cpu.lend():  # on a machine without CUDA alone: docs/dev/megatron.md
        main()
