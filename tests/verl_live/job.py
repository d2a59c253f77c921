"""draft"""
from __future__ import annotations
import json, os, sys
from pathlib import Path
from typing import Any

HELPERS = str(Path(__file__).parent / "helpers.py")
R = "actor_rollout_ref.rollout."
A = "actor_rollout_ref.actor."

def make(folder: Path) -> None:
    from verl_live import tiny
    tiny.save(folder / "model")
    tiny.save_prompts(folder / "prompts.jsonl", 16)
    (folder / "notes").mkdir()

def lines(folder: Path, steps: int) -> dict[str, Any]:
    o = A + "megatron.override_transformer_config"
    return {
        "actor_rollout_ref.model.path": str(folder / "model"),
        "actor_rollout_ref.model.external_lib": "npu_replay",
        "data.train_files": str(folder / "prompts.jsonl"), "data.val_files": str(folder / "prompts.jsonl"),
        "data.train_batch_size": 4, "data.max_prompt_length": 16, "data.max_response_length": 24, "data.dataloader_num_workers": 0, "data.shuffle": False,
        R+"n": 4, R+"tensor_model_parallel_size": 1, R+"dtype": "float32", R+"enforce_eager": True, R+"free_cache_engine": False, R+"enable_sleep_mode": False,
        R+"load_format": "auto", R+"max_model_len": 64, R+"max_num_batched_tokens": 64, R+"max_num_seqs": 8, R+"enable_rollout_routing_replay": True,
        R+"agent.num_workers": 1, R+"multi_turn.function_tool_path": HELPERS, R+"multi_turn.max_assistant_turns": 3, R+"engine_kwargs.vllm": {"distributed_executor_backend": "uni"}, R+"checkpoint_engine.update_weights_bucket_megabytes": 16,
        R+"log_prob_micro_batch_size_per_gpu": 4,
        A+"ppo_mini_batch_size": 2, A+"ppo_micro_batch_size_per_gpu": 4, A+"use_kl_loss": False, A+"use_torch_compile": False,
        A+"optim.lr": 1e-3, A+"optim.weight_decay": 0.0,
        A+"megatron.router_replay.mode": "R3", A+"megatron.vanilla_mbridge": True, A+"megatron.sequence_parallel": False,
        o: {"attention_backend": "unfused", "use_cpu_initialization": True, "moe_grouped_gemm": False, "persist_layer_norm": False, "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "algorithm.adv_estimator": "grpo",
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.val_before_train": False, "trainer.test_freq": -1, "trainer.save_freq": -1, "trainer.total_training_steps": steps, "trainer.total_epochs": 1, "trainer.logger": ["file"], "trainer.resume_mode": "disable", "trainer.balance_batch": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.num_workers": 1, "reward.custom_reward_function.path": HELPERS,
        "ray_kwargs.ray_init": {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
    }

def main() -> None:
    folder = Path(sys.argv[1]); folder.mkdir()
    make(folder)
    os.environ["VERL_LIVE_NOTES"] = str(folder / "notes")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    import verl_configs
    from verl.trainer import main_ppo
    main_ppo.main(verl_configs.job(lines(folder, 3)))

if __name__ == "__main__":
    main()
