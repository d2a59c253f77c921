#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B with replay: FSDP2 trains, vllm-ascend rolls out, on 2 nodes of 8 NPUs.
# 带路由重放的 GRPO，Qwen3-30B-A3B：训练用 FSDP2，推理用 vllm-ascend；2 个节点，每节点 8 卡。
# For verl's images with vLLM and transformers 5: CANN 9.1.0 (verl 0.9.1, main; A2, A3, A5), 9.0.0 (verl 0.8.0).
# 适用于 verl 的 vLLM 镜像，transformers 5：CANN 9.1.0（verl 0.9.1、main；A2、A3、A5）、9.0.0（verl 0.8.0）。
#
# On each node, in the container with npu_replay; 在每个节点上，于已安装 npu_replay 的容器中：
#
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   export HCCL_CONNECT_TIMEOUT=1500 RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
#   export HCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0        # between the nodes, by ip addr; 节点间的网卡
#   ray start --head --port 6379 --resources '{"NPU": 8}'         # the first node; 第一个节点
#   ray start --address FIRST_NODE:6379 --resources '{"NPU": 8}'  # the second; 第二个节点
#
# Then on the first; 然后在第一个节点上：
#
#   MODEL=/shared/Qwen3-30B-A3B DATA=/shared/gsm8k bash npu_fsdp2.sh
#
#   MODEL  the model's folder, as Hugging Face has it, on both nodes; Hugging Face 格式的模型目录，各节点路径相同
#   DATA   GSM8K by verl's examples/data_preprocess/gsm8k.py, likewise; 由该脚本生成的 GSM8K 目录，同上
#   MODE   R3, or R2; 默认 R3，可改为 R2
#   NODES  2; 节点数，默认 2
#   NPUS   8 a node; 每个节点的卡数，默认 8
#
# What you write behind it comes last, and counts; --cfg job, as the last, shows the config alone. Two steps as a trial:
# 写在命令后面的参数追加在最后，以其为准；--cfg job 须放在最后，只打印完整配置，不启动作业。先试两步：
#   trainer.total_training_steps=2 trainer.save_freq=-1 trainer.test_freq=-1
# Every 20 steps verl saves model and optimizer, some 400 GB, below checkpoints/ of this folder (trainer.default_local_dir),
# keeps all, and goes on from the last when started again (trainer.resume_mode).
# verl 每 20 步把模型和优化器（约 400 GB）保存到当前目录的 checkpoints/ 下，全部保留；再次启动时从最后一次继续。
# Not run on an NPU: verl 0.7.1, 0.8.0 and 0.9.1 compose and check it; replay itself ran on CPUs (docs/dev/tried.md).
# 尚未在 NPU 上运行：由 verl 0.7.1、0.8.0、0.9.1 组合并检查配置；重放本身在 CPU 上运行过。
set -euo pipefail
: "${MODEL:?the folder of Qwen3-30B-A3B, as Hugging Face has it (模型目录)}"
: "${DATA:?the folder of train.parquet, test.parquet (数据目录)}"
MODE=${MODE:-R3} NODES=${NODES:-2} NPUS=${NPUS:-8}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python3 -c 'import importlib.util; raise SystemExit(importlib.util.find_spec("vllm") is None)' ||
    { echo "npu_fsdp2.sh: there is no vLLM here, with which this job rolls out. 这里没有安装 vLLM。" >&2 && exit 1; }
replay=$(python3 "$here/replay_lines.py" --words "$MODE" fsdp2 npu)
printf 'npu_replay adds:\n%s\n' "$replay" >&2
mapfile -t replay <<<"$replay"

prompt=1024 response=2048
tokens=$(((prompt + response) * 2)) # in a micro-batch of a device

data=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    "data.max_prompt_length=$prompt"
    "data.max_response_length=$response"
    data.filter_overlong_prompts=True
    data.truncation=error
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)
actor=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens"
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$tokens"
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
)
rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.max_model_len=$((prompt + response))
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$tokens"
)
trainer=(
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$NPUS"
    trainer.device=npu
    trainer.logger='["console","tensorboard"]'
    trainer.project_name=npu_replay
    trainer.experiment_name="qwen3_30b_a3b_$MODE"
    trainer.val_before_train=False
    trainer.test_freq=5
    trainer.save_freq=20
    trainer.total_epochs=1
)

exec python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer \
    "${data[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "${replay[@]}" "$@"
