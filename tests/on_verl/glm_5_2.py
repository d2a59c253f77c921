"""verl's own job with R3 for Megatron core_v0.18.0 on NPUs: GLM-5.2, fully async, in padded sequences.

The lines are those of its `examples/ascend_extras/grpo_trainer/run_glm5_2_megatron.sh` that say what the
engine of the actor runs and what its rollout is asked for, without data, paths, optimizer and the reference.
"""

from __future__ import annotations

from pathlib import Path

import verl
from omegaconf import DictConfig

from verl_configs import CONFIGS, overridden

FULLY_ASYNC = Path(verl.__path__[0]) / "experimental" / "fully_async_policy" / "config"

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = f"+{_ACTOR}.megatron.override_transformer_config"
LINES = [
    "data.train_batch_size=0",
    "data.max_prompt_length=2048",
    "data.max_response_length=32768",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.use_fused_kernels=False",
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.98_1.02",
    f"{_ACTOR}.strategy=megatron",
    f"{_ACTOR}.ppo_mini_batch_size=16",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{_ACTOR}.use_dynamic_bsz=False",
    f"{_ACTOR}.ppo_max_token_len_per_gpu=34816",
    f"{_ACTOR}.use_rollout_log_probs=True",
    f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean",
    f"{_ACTOR}.policy_loss.loss_mode=gspo",
    f"{_ACTOR}.megatron.use_remove_padding=False",
    f"{_ACTOR}.megatron.pad_bshd_to_minibatch_max=False",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size=8",
    f"{_ACTOR}.megatron.tensor_model_parallel_size=4",
    f"{_ACTOR}.megatron.context_parallel_size=4",
    f"{_ACTOR}.megatron.expert_model_parallel_size=32",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size=1",
    f"{_ACTOR}.megatron.router_replay.mode=R3",
    f"{_MODEL}.recompute_method=uniform",
    f"{_MODEL}.recompute_granularity=full",
    f"{_MODEL}.recompute_num_layers=1",
    f"{_MODEL}.experimental_attention_variant=dsa",
    f"{_MODEL}.moe_router_enable_expert_bias=True",
    f"{_MODEL}.moe_router_dtype=fp32",
    f"{_MODEL}.moe_shared_expert_overlap=False",
    f"{_MODEL}.context_parallel_algo=kvallgather_cp_algo",
    f"{_MODEL}.reset_position_ids=False",
    f'{_MODEL}.pipeline_model_parallel_layout="Et*10|t*12|t*8|t*8|t*12|t*12|t*12|t*4L"',
    f"{_ROLLOUT}.name=vllm",
    f"{_ROLLOUT}.n=8",
    f"{_ROLLOUT}.tensor_model_parallel_size=8",
    f"{_ROLLOUT}.data_parallel_size=8",
    f"{_ROLLOUT}.expert_parallel_size=64",
    f"{_ROLLOUT}.calculate_log_probs=True",
    f"{_ROLLOUT}.enforce_eager=False",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz=False",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu=34816",
    f"+{_ROLLOUT}.engine_kwargs.vllm.additional_config.enable_cpu_binding=True",
    f"+{_ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
    f"{_ROLLOUT}.enable_rollout_routing_replay=True",
    "async_training.partial_rollout=True",
    "trainer.device=npu",
]


def job(*lines: str) -> DictConfig:
    """The whole config of the job, with more lines."""
    found = f"hydra.searchpath=[file://{CONFIGS}]"
    return overridden("fully_async_ppo_megatron_trainer", [found, *LINES, *lines], folder=FULLY_ASYNC)
