"""MindSpeed's features that reach into MoE layers, one case each, and how each is turned on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

EXPERTS = 4
TOPK = 2


@dataclass(frozen=True)
class Case:
    """One way of running a small MoE model under MindSpeed.

    Args:
        flag: MindSpeed's own argument; a product whose parser doesn't know it has not the feature.
        module: a module of Megatron's that the feature builds on; a Megatron without it has not the feature.
        args: what repatch() is given, and every config then has.
        config: for the TransformerConfig alone.
        expert, tensor: parallel sizes; the case takes their product of processes.
        recompute: does the feature allow full activation recompute?
        schedule: "plain" runs micro-batches one after another and backward once, over the sum of the losses;
            "overlap" is MindSpeed's forward_backward_no_pipelining.
        reference: of these `args`, those that are turned off for the run whose gradients must be the same.
        shows: part of the name of a class or function of the MoE layer, by which it is seen to be on.
        own_gradients: its gradients aren't the reference's, nor those without recompute, untouched too.
    """

    flag: str = ""
    module: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    expert: int = 1
    tensor: int = 1
    recompute: bool = True
    schedule: str = "plain"
    reference: tuple[str, ...] = ()
    shows: str = ""
    own_gradients: bool = False

    @property
    def world(self) -> int:
        """How many processes it takes."""
        return max(self.expert, self.tensor)

    @property
    def expert_tensor(self) -> int:
        """Megatron's alltoall_seq cuts experts over tensor-parallel ranks as it does the rest."""
        return self.tensor if "alltoall_seq" in self.args.values() else 1


GROUPED = {"moe_grouped_gemm": True}
SEQ_MODULE = "megatron.core.transformer.moe.legacy_a2a_token_dispatcher"
SEQ = {"moe_token_dispatcher_type": "alltoall_seq", "moe_permutation_async_comm": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
GATHER = {"moe_token_dispatcher_type": "allgather", "moe_permutation_async_comm": True} | GROUPED
FUSION = {"moe_permute_fusion": True, "use_fused_moe_token_permute_and_unpermute": True}

PERMUTE = Case(
    shows="fused_moe_permute.permute",
    flag="use_fused_moe_token_permute_and_unpermute",
    args=FUSION,
    reference=tuple(FUSION),
)
ALLTOALL_SEQ = Case(
    module=SEQ_MODULE,
    shows="MoEAlltoAllSEQTokenDispatcher",
    args=SEQ,
    reference=("moe_token_dispatcher_type",),
)
OVERLAP = Case(
    shows="MindSpeedAlltoAllOverlapMoeLayerAdaptor",
    flag="moe_alltoall_overlap_comm",
    args={"moe_alltoall_overlap_comm": True} | GROUPED,
    expert=2,
    reference=("moe_alltoall_overlap_comm", "moe_zero_memory"),
)
FB_OVERLAP = Case(
    shows="MindSpeedFbOverlapMoELayer",
    flag="moe_fb_overlap",
    args={"moe_fb_overlap": True} | GROUPED,
    expert=2,
    schedule="overlap",
    reference=("moe_fb_overlap",),
)
BALANCED = replace(
    FB_OVERLAP,
    own_gradients=True,
    shows="BalancedMoELayer",
    flag="balanced_moe_experts",
    args=FB_OVERLAP.args | {"balanced_moe_experts": True, "balanced_moe_hot_expert_num": 2},
    reference=("moe_fb_overlap", "balanced_moe_experts"),
)
PRE_SOFTMAX = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_pre_softmax": True,
}
SCORE_REUSE = Case(
    shows="router_score_reuse_wrapper",
    flag="moe_router_score_reuse",
    args={"moe_router_score_reuse": True},
    reference=("moe_router_score_reuse",),
    config=PRE_SOFTMAX,
)
REUSED = {
    "score_reuse": {},
    "score_reuse_after_softmax": {"moe_router_pre_softmax": False},
    "score_reuse_groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "score_reuse_sigmoid_bias": {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "score_reuse_router_replay": {"moe_enable_routing_replay": True},
}
FAST_OPS = Case(
    shows="permute_npu_wrapper",
    flag="moe_npu_fast_ops",
    args={"moe_npu_fast_ops": True},
    reference=("moe_npu_fast_ops",),
    config=PRE_SOFTMAX,
)
CASES: dict[str, Case] = {
    "none": Case(shows="moe_layer.MoELayer"),
    "permute_fusion": PERMUTE,
    "permute_fusion_ep2": replace(PERMUTE, expert=2),
    "grouped_gemm": Case(shows="MindSpeedGmmExperts", args=GROUPED),
    "alltoall_seq": ALLTOALL_SEQ,
    "alltoall_seq_tp2": replace(ALLTOALL_SEQ, args=SEQ | TENSOR, tensor=2),
    "alltoall_overlap": OVERLAP,
    "alltoall_seq_overlap": replace(
        OVERLAP,
        module=SEQ_MODULE,
        shows="MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor",
        args=OVERLAP.args | SEQ,
    ),
    **{
        f"zero_memory_{level}": replace(
            OVERLAP, flag="moe_zero_memory", args=OVERLAP.args | {"moe_zero_memory": level}
        )
        for level in ("level0", "level1")
    },
    "allgather_overlap": Case(
        shows="MindSpeedAllGatherOverlapMoeLayerAdaptor",
        flag="moe_allgather_overlap_comm",
        args={"moe_allgather_overlap_comm": True} | GATHER,
        expert=2,
        reference=("moe_allgather_overlap_comm",),
    ),
    "alltoall_mc2": Case(
        shows="MindSpeedAlltoAllMC2MoeLayerAdaptor",
        flag="moe_alltoall_mc2",
        args={"moe_alltoall_mc2": True} | GROUPED,
        expert=2,
        reference=("moe_alltoall_mc2",),
    ),
    "fb_overlap": FB_OVERLAP,
    "fb_overlap_no_recompute": replace(FB_OVERLAP, recompute=False),
    "fb_overlap_dense_first": replace(FB_OVERLAP, config={"moe_layer_freq": [0, 1, 1]}),
    "balanced_moe": replace(BALANCED, recompute=False),
    "balanced_moe_recompute": BALANCED,
    **{name: replace(SCORE_REUSE, config=PRE_SOFTMAX | changes) for name, changes in REUSED.items()},
    "fast_ops": FAST_OPS,
    "fast_ops_score_reuse": replace(
        FAST_OPS,
        expert=2,
        args=FAST_OPS.args | SCORE_REUSE.args,
        reference=FAST_OPS.reference + SCORE_REUSE.reference,
    ),
}
