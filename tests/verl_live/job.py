"""verl's own trainer, as `python -m verl.trainer.main_ppo` runs it: GRPO with R3, on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_live import tiny

STEPS = 2
PROMPTS = 4
SAMPLES = 4
"""Steps, prompts a step, samples a prompt."""
MICRO = 4
MINI = 2
"""Samples of a micro-batch; prompts of an update, so two updates a step."""
RESPONSE = 24
HELPERS = str(Path(__file__).parent / "helpers.py")
MODEL, ROLLOUT, ACTOR = (f"actor_rollout_ref.{part}" for part in ("model", "rollout", "actor"))

LOCAL_LAYERS = {
    "attention_backend": "unfused",
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""What mbridge sets for Transformer Engine and CUDA, and full recompute."""


def rollout_lines(model: Path) -> dict[str, Any]:
    """verl's vLLM server on a CPU, in float32: its rows can then be held against transformers' own."""
    return {
        f"{MODEL}.path": str(model),
        f"{MODEL}.external_lib": "npu_replay",
        "data.max_prompt_length": 16,
        "data.max_response_length": RESPONSE,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.load_format": "auto",
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.enable_sleep_mode": False,  # vLLM has none on a CPU
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.max_model_len": 96,
        f"{ROLLOUT}.max_num_batched_tokens": 96,
        f"{ROLLOUT}.max_num_seqs": 8,
        f"{ROLLOUT}.engine_kwargs.vllm": {"distributed_executor_backend": "uni"},
        f"{ROLLOUT}.enable_rollout_routing_replay": True,
        f"{ROLLOUT}.multi_turn.function_tool_path": HELPERS,
        f"{ROLLOUT}.multi_turn.max_assistant_turns": 3,
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ACTOR}.megatron.router_replay.mode": "R3",
    }


def lines(folder: Path) -> dict[str, Any]:
    """The whole job."""
    return rollout_lines(folder / "model") | {
        "data.train_files": str(folder / "prompts.jsonl"),
        "data.val_files": str(folder / "prompts.jsonl"),
        "data.train_batch_size": PROMPTS,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        f"{ROLLOUT}.n": SAMPLES,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": MICRO,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        f"{ACTOR}.ppo_mini_batch_size": MINI,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": MICRO,
        f"{ACTOR}.use_torch_compile": False,
        f"{ACTOR}.optim.lr": 1e-3,
        f"{ACTOR}.megatron.vanilla_mbridge": True,
        f"{ACTOR}.megatron.sequence_parallel": False,
        f"{ACTOR}.megatron.override_transformer_config": LOCAL_LAYERS,
        "algorithm.adv_estimator": "grpo",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HELPERS,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.balance_batch": False,
        "trainer.resume_mode": "disable",
        "trainer.logger": ["file"],
        "ray_kwargs.ray_init": {
            "num_cpus": 16,  # actors that wait count too
            "num_gpus": 1,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        },
    }


def main(task: dict[str, Any]) -> None:
    from verl.trainer import main_ppo

    import verl_configs

    folder = Path(task["folder"])
    (folder / "notes").mkdir()
    tiny.save(folder / "model")
    tiny.save_prompts(folder / "prompts.jsonl", STEPS * PROMPTS)
    main_ppo.main(verl_configs.job(lines(folder)))
