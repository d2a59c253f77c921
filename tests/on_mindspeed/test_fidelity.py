"""The stand-in behaves as MindSpeed does: what is believed of MindSpeed, asked of both.

A belief that fails on the real one is no fact (any more); one that fails on the stand-in alone is the
stand-in's mistake, and whatever is tested on it proves nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from on_mindspeed import processes
from on_mindspeed.fidelity_worker import NO_REPLACE
from on_mindspeed.stand_in.mindspeed.branch import BRANCHES, VARIABLE, played

pytestmark = [pytest.mark.megatron, pytest.mark.first_release, pytest.mark.slow]

UNEXPECTED = "TypeError: TransformerConfig.__init__() got an unexpected keyword argument"
OVERLAP = ("block", "schedule", "spec")
INPUTS = [
    *("context", "context_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "attention_bias"),
    *("inference_params", "packed_seq_params"),
]
BACKWARD = ["bwd_layer_output_grad", "bwd_layer_graph", "bwd_unperm_a2a_handle", "next_bwd_layer_graph"]
FACTS: dict[str, dict[str, Any]] = {
    # Compiling is turned off and hides name and signature; packages of CUDA are there as dummies.
    "torch": {
        "HAVE_TE": True,
        "signatures": ["(*fn_args, **fn_kwargs)"] * 2,
        "names": ["wrapper"] * 2,
        "runs": [3, 3, 3],
        "a view aliases": False,
    },
    # A patch goes to every module that holds the same object. Its removal goes by identity and passes
    # MindSpeed's own modules; the next apply discards what came over it.
    "manager": {
        "registered": "o",
        "everywhere": ["1(o)"] * 3,
        "is_applied": [False, True, False],
        "stacked": "2(1(o))",
        "replaced": "2(1(r))",
        "replaced twice": "RuntimeError: the patch of work exist !",
        "removed": ["ours(2(1(r)))", "o", "2(1(r))"],
        "forgotten": [0, True, True],
        "applied again": ["1(o)", True],
        "a wrapped alias": ["1(ours(o))", "o", "o"],
    },
    # An unknown argument becomes the config's attribute, unless the class has it; a config has its own class.
    "config": {
        "an unknown argument": True,
        "of MLA": True,
        "isn't given": False,
        "its class": "types.TransformerConfig",
        "is one": True,
        "classes": 3,
        "more fields, in init, with defaults": [True, False, False],
        "copy": True,
        "deepcopy": True,
        "asdict": True,
        "replace": NO_REPLACE.format("TransformerConfig"),
        "type": NO_REPLACE.format("TransformerConfig"),
        "type with the flag": UNEXPECTED,
        "made of its fields": False,
        "pickle": "PicklingError: Can't pickle <class 'types.TransformerConfig'>",
        "on the class": [False, False],
        "repatched": [True, True],
        "filled": [4, 3],
        "in the signature": UNEXPECTED,
        "in the signature, over MegatronAdaptor": True,
        "after a repatch": True,
    },
    # Branches that patch __init_subclass__ let it live; on the others it can't even be made.
    "subclass": {"as its branch has it": True, "unknown": "TypeError"},
    # They are Megatron's global ones once those are set.
    "arguments": {
        "its own": [True, 1, 2],
        "defaults": False,
        "a config is checked": "AssertionError: moe_fb_overlap requires moe_grouped_gemm.",
        "megatron.training's": [True, 2],
        "repatched": [3, 1],
    },
    # A repatch discards wraps of places that were ever registered.
    "wraps": {
        "lost when removed": [],
        "lost when repatched": [
            *("TransformerConfig.__init__", "TransformerConfig.__post_init__"),
            "MLATransformerConfig.__init__",
        ],
        "a method is put back as its branch does": True,
        "once registered": True,
    },
    # The layer, whether it is a Megatron MoELayer, and what else changes: never the router's class.
    "features": {
        "moe_alltoall_overlap_comm": ["MindSpeedAlltoAllOverlapMoeLayerAdaptor", False],
        "moe_alltoall_overlap_comm seq": ["MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor", True],
        "moe_allgather_overlap_comm": ["MindSpeedAllGatherOverlapMoeLayerAdaptor", True],
        "moe_alltoall_mc2": ["MindSpeedAlltoAllMC2MoeLayerAdaptor", True],
        "moe_tp_extend_ep": ["MindSpeedAlltoAllSEQTptoEpMoELayer", True, "routing"],
        "moe_fb_overlap": ["MoELayer", True, *OVERLAP],
        "balanced_moe_experts": ["MoELayer", True, *OVERLAP],
        "fix_router": ["MoELayer", True, "topk"],
        "left": [],
    },
    # The names inside moe_fb_overlap that npu_replay goes by.
    "signatures": {
        "layer": [
            *("fwd_layer", "hidden_states", "attention_mask", *BACKWARD, *INPUTS),
            *("pp_comm_params", "bwd_pp_comm_params", "checkpoint"),
        ],
        "forward": ["args", "kwargs"],
        "backward": ["layer_output_grad", "layer_graph"],
        "forward_moe": ["self", "hidden_states", "attention_mask", *INPUTS, "checkpoint"],
        "block": [
            *("self", "hidden_states", "attention_mask", *INPUTS[:-2], "inference_context"),
            *("packed_seq_params", "sequence_len_offset", "inference_params", "bwd_block_output_grad"),
            *("bwd_block_graphs", "pp_comm_params", "bwd_pp_comm_params"),
        ],
        "layer_inputs": [1, 2, 3],
        "unpacked": 2,
    },
}
LATE = {
    "without MindSpeed": "TypeError",
    "HAVE_TE where it is there": True,
    "arguments": [True, ["1", "2"], "3"],
    "a wrap from before": ["survivor"],
    "all_reduce": {"float64": 1.0, "float32": 2.0, "int64": 2},
}
"""Megatron before MindSpeed: a wrap from before survives. float64 is forgotten by all_reduce."""


@functools.cache
def found_in(product: str, scenario: str, branch: str = "") -> dict[str, Any]:
    """One process for each, however many tests ask."""
    with pytest.MonkeyPatch.context() as patch:
        if branch:
            patch.setenv(VARIABLE, branch)
        ranks = 2 if scenario == "late" else 1
        task = {"scenario": scenario}
        return processes.run_ranks(product, "fidelity_worker:main", task, ranks, timeout=280)[-1]


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """They are the same; of an error the beginning. None where a branch hasn't the feature."""
    for name, value in found.items():
        error = isinstance(value, str) and isinstance(expected[name], str)
        found[name] = value[: len(expected[name])] if error else expected[name] if value is None else value
    assert found == expected


@pytest.mark.parametrize("about", FACTS)
@pytest.mark.parametrize("branch", ["", "26.1.0"], ids=["own-branch", "26.1.0"])
def test_a_fact_of_mindspeed_imported_first(product: str, branch: str, about: str) -> None:
    if branch and product == processes.REAL:
        pytest.skip("a real MindSpeed is one branch")
    if branch and played() is not BRANCHES["2.3.0"]:
        pytest.skip(f"{branch} goes with Megatron-core 0.12")
    check(found_in(product, "first", branch)[about], FACTS[about])


def test_the_facts_of_mindspeed_imported_after_megatron(product: str) -> None:
    check(found_in(product, "late"), LATE)
