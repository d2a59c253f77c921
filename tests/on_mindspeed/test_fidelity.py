"""The stand-in behaves as MindSpeed does: what is believed of MindSpeed, asked of both.

A belief that fails on the real one is no fact (any more); one that fails on the stand-in alone is the
stand-in's mistake, and whatever is tested on it proves nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.first_release, pytest.mark.slow]

WORKER = "fidelity_worker:main"
Found = dict[str, Any]
NO_REPLACE = "AttributeError: '{}' object has no attribute 'moe_zero_memory_num_layers'"


@functools.cache
def found_in(product: str, scenario: str, branch: str = "") -> Found:
    """One process for each, however many tests ask."""
    with pytest.MonkeyPatch.context() as patch:
        if branch:
            patch.setenv("MINDSPEED_STAND_IN", branch)
        ranks = 2 if scenario == "late" else 1
        return processes.run_ranks(product, WORKER, {"scenario": scenario}, ranks, timeout=280)[-1]


@pytest.fixture(params=["", "26.1.0"], ids=["own-branch", "26.1.0"])
def first(product: str, request: pytest.FixtureRequest) -> Found:
    """MindSpeed before Megatron; the stand-in also as a newer branch."""
    if request.param and product == processes.REAL:
        pytest.skip("a real MindSpeed is one branch")
    return found_in(product, "first", request.param)


@pytest.fixture
def late(product: str) -> Found:
    """Megatron before MindSpeed, and flags on the command line."""
    return found_in(product, "late")


# Activation


def test_importing_the_adaptor_does_everything_once(first: Found) -> None:
    assert first["activation"] == {
        "suppressed": True,  # by NoExecuteFunction
        "no_features": 0,
        "transfer_first": True,
        "patched": True,
        "once": True,
    }


def test_megatron_takes_the_dummies_for_cuda_packages_if_mindspeed_comes_first(
    first: Found, late: Found
) -> None:
    assert first["imports"] == {"HAVE_TE": True, "accumulation": True}
    assert (late["HAVE_TE"], late["accumulation"]) == (False, False)


def test_unknown_flags_of_the_command_line_become_arguments(late: Found) -> None:
    assert late["args"] == [True, ["1", "2"], "3", True]


def test_a_short_flag_of_the_command_line_poisons_every_config(late: Found) -> None:
    assert late["poisoned"] == "TypeError: Field names must be valid identifiers: ''"


def test_arguments_are_megatrons_global_ones_once_they_are_set(first: Found) -> None:
    arguments = first["arguments"]
    assert arguments["own"]
    assert arguments["kept"] == 1
    assert arguments["level"] == 2
    assert not arguments["defaults_fresh"]
    assert arguments["training"] == [True, 2]
    assert arguments["repatch_training"] == [3, 1]
    assert arguments["back"]


def test_compiling_is_turned_off_and_hides_name_and_signature(first: Found) -> None:
    torch = first["torch"]
    assert torch["signature"] == dict.fromkeys(("compile", "script"), "(*fn_args, **fn_kwargs)")
    assert torch["name"] == dict.fromkeys(("compile", "script"), "wrapper")
    assert torch["runs"] == [3, 3]
    assert torch["with_arguments"] == 3


def test_a_view_of_what_is_not_contiguous_is_a_copy(first: Found) -> None:
    assert not first["torch"]["view_aliases"]


def test_all_reduce_forgets_float64_alone(late: Found) -> None:
    assert late["all_reduce"] == {"float64": 1.0, "float32": 2.0, "int64": 2}


# Patches


def test_wrappers_stack_and_a_second_replacement_is_an_error(first: Found) -> None:
    manager = first["manager"]
    assert manager["not_yet"] == "o"
    assert manager["stacked"] == "2(1(o))"
    assert manager["replaced"] == "2(1(r))"
    assert manager["second_replace"] == "RuntimeError: the patch of work exist !"
    assert manager["forced"] == "2(o)"
    applied = [manager[f"is_applied_{when}"] for when in ("before", "after", "anew")]
    assert applied == [False, True, False]


def test_a_patch_goes_to_every_module_that_holds_the_same_object(first: Found) -> None:
    assert first["manager"]["wrapped"] == ["1(o)"] * 3


def test_removal_restores_by_identity_and_passes_mindspeeds_own_modules(first: Found) -> None:
    """The owner was wrapped by somebody since; the alias was not; the third has mindspeed in its name."""
    manager = first["manager"]
    assert manager["removed"] == ["ours(2(o))", "o", "2(o)"]
    assert manager["forgotten"] == [0, True, True]


def test_the_next_apply_discards_what_came_over_a_patch(first: Found) -> None:
    manager = first["manager"]
    assert manager["orig_kept"]
    assert (manager["reapplied"], manager["off"]) == ("1(o)", "o")


def test_aliases_are_passed_by_if_somebody_wrapped_the_one_that_is_patched(first: Found) -> None:
    assert first["manager"]["alias_hazard"] == ["1(ours(o))", "o", "o"]


def test_a_dummy_is_made_of_a_module_that_is_not_there(first: Found) -> None:
    assert first["manager"]["dummy"] == "RuntimeError: function toy_dummy.inner.work no exist"


def test_a_repatch_discards_wraps_of_places_that_were_ever_registered(first: Found) -> None:
    third_party = first["third_party"]
    assert third_party["after_removal"] == dict.fromkeys(third_party["after_removal"], True)
    assert third_party["after_repatch"] == {
        "TransformerConfig.__init__": False,
        "TransformerConfig.__post_init__": False,
        "MLATransformerConfig.__init__": False,
        "TopKRouter.__init__": True,
        "TopKRouter.routing": True,
        "TopKRouter.forward": True,
    }
    assert third_party["once_registered"]


def test_newer_branches_put_methods_back_when_a_patch_is_removed(first: Found) -> None:
    assert first["third_party"]["method_restored"] == first["restores_methods"]


def test_a_wrap_from_before_mindspeed_survives_every_repatch(late: Found) -> None:
    assert late["without_mindspeed"].startswith("TypeError")
    assert late["survivor"] == ["survivor"]


# The config


def test_an_unknown_argument_of_a_config_becomes_its_attribute(first: Found) -> None:
    config = first["config"]
    assert (config["unknown"], config["unknown_mla"], config["absent"]) == (True, True, False)


def test_an_attribute_of_the_class_drops_the_argument(first: Found) -> None:
    config = first["config"]
    assert config["class_attribute_drops"] is False
    assert config["class_attribute_drops_repatch"] is False


def test_a_config_has_a_class_of_its_own(first: Found) -> None:
    config = first["config"]
    assert config["isinstance"]
    assert not config["class_is_own"]
    assert not config["class_per_instance"]
    assert config["class_name"] == "types.TransformerConfig"
    assert (config["extra_fields"], config["extra_in_init"], config["extra_defaults"]) == (True, False, False)


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("copy", True),
        ("deepcopy", True),
        ("asdict", True),
        ("asdict_extras", True),
        ("replace", NO_REPLACE.format("TransformerConfig")),
        ("type", NO_REPLACE.format("TransformerConfig")),
        ("type_with_flag", "TypeError: TransformerConfig.__init__() got an unexpected keyword argument"),
        ("rebuilt", False),
        ("pickle", "PicklingError: Can't pickle <class 'types.TransformerConfig'>"),
        ("filled", 4),
        ("explicit_wins", 3),
        ("repatch_reaches_all", [True, True]),
        ("signature_written", "TypeError: TransformerConfig.__init__() got an unexpected keyword argument"),
        ("signature_mended", True),
    ],
)
def test_what_an_operation_does_to_a_config_with_the_flag(first: Found, operation: str, result: Any) -> None:
    found = first["config"][operation]
    if isinstance(result, str):
        assert found.startswith(result)
    else:
        assert found == result


def test_a_subclass_of_the_config_goes_by_the_branch(first: Found) -> None:
    """Branches that patch __init_subclass__ let it live; on the others it can't even be made."""
    subclass = first["subclass"]
    asked = [subclass[what] for what in ("made", "own_class", "replaced", "pickled")]
    assert asked == [True if subclass["registered"] else NO_REPLACE.format("Provider")] * 4
    assert subclass["unknown"].startswith("TypeError")


def test_every_config_goes_through_the_checks_of_all_features(first: Found) -> None:
    assert first["arguments"]["checked"] == "AssertionError: moe_fb_overlap requires moe_grouped_gemm."


# Features

OVERLAP = ["block", "schedule", "spec"]
LAYERS = {
    # feature: (layer, a Megatron MoELayer, what else changes)
    "moe_alltoall_overlap_comm": ("MindSpeedAlltoAllOverlapMoeLayerAdaptor", False, []),
    "moe_alltoall_overlap_comm seq": ("MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor", True, []),
    "moe_allgather_overlap_comm": ("MindSpeedAllGatherOverlapMoeLayerAdaptor", True, []),
    "moe_alltoall_mc2": ("MindSpeedAlltoAllMC2MoeLayerAdaptor", True, []),
    "moe_tp_extend_ep": ("MindSpeedAlltoAllSEQTptoEpMoELayer", True, ["routing"]),
    "moe_fb_overlap": ("MoELayer", True, OVERLAP),
    "balanced_moe_experts": ("MoELayer", True, OVERLAP),
    "fix_router": ("MoELayer", True, ["topk"]),
}


@pytest.mark.parametrize("feature", LAYERS)
def test_what_a_feature_puts_in_megatrons_place(first: Found, feature: str) -> None:
    """No feature patches the router's class, its __init__ or its forward."""
    replaced = first["features"][feature]
    if replaced is None:
        pytest.skip(f"this branch has no {feature}")
    layer, stock, changed = LAYERS[feature]
    assert (replaced["layer"], replaced["is_stock"], replaced["changed"]) == (layer, stock, changed)


def test_features_that_are_turned_off_leave_nothing(first: Found) -> None:
    assert first["features"]["left"] == []


def test_the_names_inside_fb_overlap_that_npu_replay_goes_by(first: Found) -> None:
    names = first["signatures"]
    inputs = [
        "attention_mask",
        "context",
        "context_mask",
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "attention_bias",
        "inference_params",
        "packed_seq_params",
    ]
    assert names["forward_moe"] == ["self", "hidden_states", *inputs, "checkpoint"]
    assert names["forward"] == ["args", "kwargs"]
    backward = ["bwd_layer_output_grad", "bwd_layer_graph", "bwd_unperm_a2a_handle", "next_bwd_layer_graph"]
    assert names["layer"] == [
        "fwd_layer",
        "hidden_states",
        "attention_mask",
        *backward,
        *inputs[1:],
        "pp_comm_params",
        "bwd_pp_comm_params",
        "checkpoint",
    ]
    assert names["backward"] == ["layer_output_grad", "layer_graph"]
    assert names["block"] == [
        "self",
        "hidden_states",
        *inputs[:-2],
        "inference_context",
        "packed_seq_params",
        "sequence_len_offset",
        "inference_params",
        "bwd_block_output_grad",
        "bwd_block_graphs",
        "pp_comm_params",
        "bwd_pp_comm_params",
    ]
    assert names["layer_inputs"] == [1, 2, 3]
    assert names["unpacked"] == 2
