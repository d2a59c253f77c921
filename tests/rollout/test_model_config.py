"""RoutedModel: what a config says of a model's routers, against the routers that the built model has."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from npu_replay import ReplayError, RouterError, routers
from npu_replay.rollout.model_config import RoutedModel, has_windows, is_hybrid
from zoo import hugging_face
from zoo.hugging_face import LATENT

transformers.logging.set_verbosity_error()

SIZES = hugging_face.SIZES | {"num_hidden_layers": 4}
ONE_GROUP = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}

# Each way in which a family of transformers says which layers have experts, and which have them then.
# fmt: off
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}, (0, 1, 2, 3)),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        (1,)),
    "deepseek_v3": ("deepseek_v3", LATENT | ONE_GROUP | {"first_k_dense_replace": 2}, (2, 3)),
    "exaone_moe": ("exaone_moe",
        {"num_experts": 8, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, (1, 3)),
    "ernie4_5_moe": ("ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        "moe_layer_interval": 1}, (1, 2)),
    "ernie4_5_moe, every second": ("ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1,
        "moe_layer_interval": 2}, (1, 3)),
    "llama4, by a step": ("llama4_text",
        {"num_local_experts": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48}, (1, 3)),
    "jamba": ("jamba",
        {"num_experts": 8, "expert_layer_period": 3, "expert_layer_offset": 1, "use_mamba_kernels": False},
        (1,)),
    "nemotron_h": ("nemotron_h",
        {"n_routed_experts": 8, "n_group": 1, "topk_group": 1,
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 16}, (1, 3)),
}
# fmt: on


# The truth: a built model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_what_the_built_model_has(family: str, tmp_path: Path) -> None:
    model_type, special, layers = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | special)))
    built = routers.find([model])[0]
    truth = RoutedModel(layers=layers, num_layers=4, num_experts=8, topk=built[0].topk)
    assert tuple(router.label for router in built) == layers
    assert {(router.num_experts, router.topk) for router in built} == {(8, truth.topk)}
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for form in (model, model.config, model.config.to_dict(), file, str(file), tmp_path, str(tmp_path)):
        assert RoutedModel.of(form) == truth


def test_a_language_model_inside_another_is_found() -> None:
    vision = AutoConfig.for_model("qwen3_vl_moe")
    omni = AutoConfig.for_model("qwen3_omni_moe")
    for config, text in ((vision, vision.text_config), (omni, omni.thinker_config.text_config)):
        for form in (config, config.to_dict()):
            assert RoutedModel.from_config(form) == RoutedModel.from_config(text)


def test_layers_that_look_experts_up_by_token_have_no_route() -> None:
    config = AutoConfig.for_model("deepseek_v4", num_hidden_layers=5, num_hash_layers=2)
    model = RoutedModel.from_config(config)
    assert (model.hashed, model.layers) == ((0, 1), (2, 3, 4))
    assert (model.sparse, model.dense) == ((0, 1, 2, 3, 4), ())
    hub = {**DEEPSEEK_V3, "first_k_dense_replace": 0, "num_hash_layers": 3}
    assert RoutedModel.from_config(hub).hashed == (0, 1, 2)


# config.json as it is on the hub

# fmt: off
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "num_nextn_predict_layers": 1, "intermediate_size": 18432, "moe_intermediate_size": 2048,
}
# fmt: on
KIMI_K2 = DEEPSEEK_V3 | {"first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
QWEN3_30B = {
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
}
# fmt: off
LLAMA4_MAVERICK = {
    "model_type": "llama4",
    "text_config": {"num_hidden_layers": 48, "num_local_experts": 128, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
    "vision_config": {"num_hidden_layers": 34},
}
# fmt: on
NEMOTRON_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def puzzle(*blocks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As Megatron-Bridge writes a Nemotron Puzzle: no top-k at the top, and no number of layers."""
    return {
        "n_routed_experts": 128,
        "block_configs": list(blocks),
        "layers_block_type": [block["block_type"] for block in blocks],
    } | changes


def moe(topk: int | None = None, **numbers: int) -> dict[str, Any]:
    return {"block_type": "moe", **numbers} | ({} if topk is None else {"num_experts_per_tok": topk})


MAMBA = {"block_type": "mamba"}
ATTENTION = {"block_type": "attention"}


def forms(config: dict[str, Any], folder: Path) -> list[Any]:
    """The contents, a file, and objects all the way down or at the top alone."""
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    made = [config, file, types.SimpleNamespace(**config)]
    if "block_configs" in config:
        blocks = [types.SimpleNamespace(**block) for block in config["block_configs"]]
        made.append(types.SimpleNamespace(**config | {"block_configs": blocks}))
    return made


# config.json, MoE layers, decoder layers, experts, top-k
# fmt: off
HUB: dict[str, tuple[dict[str, Any], tuple[int, ...], int, int, int]] = {
    "DeepSeek-V3": (DEEPSEEK_V3, tuple(range(3, 61)), 61, 256, 8),
    "Kimi-K2.5": ({"text_config": KIMI_K2, "vision_config": {}}, tuple(range(1, 61)), 61, 384, 8),
    "Qwen3-30B-A3B": (QWEN3_30B, tuple(range(48)), 48, 128, 8),
    "Llama-4-Maverick": (LLAMA4_MAVERICK, tuple(range(1, 48, 2)), 48, 128, 1),
    "Step-3": ({"text_config": {"num_hidden_layers": 6, "moe_num_experts": 48, "moe_top_k": 3,
        "moe_layers_enum": "4, 5", "intermediate_size": 18432, "moe_intermediate_size": 5120}}, (4, 5), 6,
        48, 3),
    "MiMo-V2-Flash": ({"num_hidden_layers": 4, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_layer_freq": [0, 1, 1, 1], "intermediate_size": 16384, "moe_intermediate_size": 2048},
        (1, 2, 3), 4, 256, 8),
    "Nemotron-3-Nano": ({"num_hidden_layers": 52, "hybrid_override_pattern": NEMOTRON_PATTERN,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "intermediate_size": 1856,
        "moe_intermediate_size": 1856},
        tuple(layer for layer, kind in enumerate(NEMOTRON_PATTERN) if kind == "E"), 52, 128, 6),
    "DBRX": ({"n_layers": 4, "d_model": 64, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}},
        (0, 1, 2, 3), 4, 16, 4),
    "a Megatron config": ({"num_layers": 4, "num_moe_experts": 8, "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1, 1]}, (1, 2, 3), 4, 8, 2),
    "blocks that count, and not what stands beside": (puzzle(moe(4), MAMBA, num_experts_per_tok=6), (0,), 2,
        128, 4),
    "experts in the blocks alone": (puzzle(moe(4, n_routed_experts=64), MAMBA, n_routed_experts=None), (0,),
        2, 64, 4),
    "a block that has no experts left": (puzzle(moe(4), moe(4, n_routed_experts=0), moe(4)), (0, 2), 3, 128,
        4),
}
# fmt: on


@pytest.mark.parametrize("name", HUB)
def test_a_config_as_it_is_on_the_hub(name: str, tmp_path: Path) -> None:
    config, layers, num_layers, experts, topk = HUB[name]
    wanted = RoutedModel(layers=layers, num_layers=num_layers, num_experts=experts, topk=topk)
    before = copy.deepcopy(config)
    for form in (*forms(config, tmp_path), tmp_path, types.SimpleNamespace(config=config)):
        assert RoutedModel.from_config(form) == wanted
    assert config == before
    assert wanted.dense == tuple(sorted({*range(num_layers)} - {*layers}))


# A config that can't be read ends in an error, never in a wrong answer


# fmt: off
UNREADABLE: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "number of decoder layers"),
    "a dense model": ({"num_hidden_layers": 4, "num_attention_heads": 2}, "number of routed experts"),
    "no experts": (QWEN3_30B | {"num_experts": 0}, "number of routed experts"),
    "other experts in each layer": (QWEN3_30B | {"num_experts": [64, 128]}, "number of routed experts"),
    "no top-k": ({**QWEN3_30B, "num_experts_per_tok": None}, "experts a token"),
    "a top-k above the experts": (QWEN3_30B | {"num_experts_per_tok": 129}, "bad top-k"),
    "dense throughout": (DEEPSEEK_V3 | {"first_k_dense_replace": 61}, "can't be the MoE layers"),
    "a switch that is off": (QWEN3_30B | {"enable_moe_block": False}, "can't be the MoE layers"),
    "zero experts (LongCat)": (DEEPSEEK_V3 | {"zero_expert_num": 256}, "zero experts"),
    "dense layers, but which?": ({key: value for key, value in DEEPSEEK_V3.items()
        if key != "first_k_dense_replace"}, "doesn't say which"),
    "an unknown kind of layer": (QWEN3_30B | {"mlp_layer_types": ["sparser"] * 48},
        "unknown way which layers have experts: mlp_layer_types"),
    "a frequency to be evaluated (Megatron's)": (QWEN3_30B | {"moe_layer_freq": "([0]*1+[1]*47)"},
        "moe_layer_freq"),
    **{f"blocks {blocks}": (QWEN3_30B | {"num_hidden_layers": 1, "block_configs": blocks}, "block_configs")
        for blocks in (3, {"a": 1}, [None], [[moe(4)]],
            [{"attention": {}, "ffn": {"moe": {"num_local_experts": 8}}}])},
    "two starts (ERNIE-4.5-VL)": (QWEN3_30B
        | {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28]},
        "unknown way which layers have experts: moe_layer_"),
}
# fmt: on


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_config_that_cannot_be_read_is_refused(case: str) -> None:
    config, message = UNREADABLE[case]
    with pytest.raises(ReplayError, match=message):
        RoutedModel.from_config(config)


def test_a_file_that_is_no_config_or_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content in (b"", b"[]", b"[" * 100_000, b'{"a": 1}\x00', b"\xff\xfe\x00", b"{}"):
        file.write_bytes(content)
        with pytest.raises(ReplayError) as refused:
            RoutedModel.from_config(tmp_path)
        assert str(tmp_path) in str(refused.value.where)
    file.unlink()
    for missing, words in (
        (tmp_path / "nowhere", "nowhere"),
        ("Qwen/Qwen3-30B-A3B", r"Qwen/Qwen3-30B-A3B.*on a hub, which isn't looked up"),
        (tmp_path, r"config\.json"),
    ):
        with pytest.raises(ReplayError, match=words):
            RoutedModel.from_config(missing)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        *(({"layers": layers}, "MoE layers") for layers in ((), (1, 0), (0, 0), (1, 4), (-1, 0))),
        ({"layers": (0, 1), "hashed": (1,)}, "MoE layers"),
        ({"layers": (0,), "hashed": (4,)}, "MoE layers"),
        *(({"layers": (0,), "topk": topk}, "bad top-k") for topk in (0, 9)),
    ],
    ids=str,
)
def test_layers_that_no_model_has_are_refused(about: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        RoutedModel(**{"num_layers": 4, "num_experts": 8, "topk": 2} | about)


# Layers with numbers of their own, and layers that run several times


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "top-k": (
        puzzle(MAMBA, moe(4), ATTENTION, moe(6)),
        "layer 3: .*top-4 of 128 experts.*layer 1, got top-6",
    ),
    "experts": (puzzle(moe(4), MAMBA, moe(4, n_routed_experts=96)), "layer 2: .*got top-4 of 96"),
    "one block's own top-k beside that of all": (
        puzzle(moe(), MAMBA, moe(4), num_experts_per_tok=6, num_hidden_layers=3),
        "layer 2: .*top-6 of 128",
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_blocks_of_unlike_layers_are_refused_by_their_key_with_the_way_out(case: str, tmp_path: Path) -> None:
    config, message = UNLIKE[case]
    for form in forms(config, tmp_path):
        with pytest.raises(RouterError, match=f"block_configs, {message}") as caught:
            RoutedModel.from_config(form)
        assert "part by part" in str(caught.value)
        assert "npu_replay.record(router.module)" in str(caught.value)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({1: {"num_experts_per_tok": 3}}, "per_layer_config, layer 1: .*got top-3 of 8"),
        ({0: {"num_experts": 4}, 2: {"num_experts": 4}}, "layers differ in top-k or experts"),
        ({1: {"skip": ["mlp"]}}, "unknown way which layers have experts: per_layer_config"),
        ({1: {"num_experts": 0}}, ((0, 2, 3), 2)),
        ({1: {"head_dim": 16}}, ((0, 1, 2, 3), 2)),
        ({layer: {"num_experts_per_tok": 3} for layer in range(4)}, ((0, 1, 2, 3), 3)),
        ({}, ((0, 1, 2, 3), 2)),
    ],
)
def test_layers_own_configs_in_transformers_way_are_read(own: Any, wanted: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_moe", **SIZES | {"num_experts": 8})
    if not hasattr(config, "per_layer_config"):
        pytest.skip("a transformers without per_layer_config")
    config.per_layer_config = own
    config.save_pretrained(tmp_path)
    for form in (config, config.to_dict(), tmp_path):
        if isinstance(wanted, str):
            with pytest.raises(ReplayError, match=wanted):
                RoutedModel.from_config(form)
        else:
            model = RoutedModel.from_config(form)
            assert (model.layers, model.topk) == wanted


def test_lists_of_numbers_that_differ_are_refused_by_the_layer() -> None:
    config = {"num_hidden_layers": 3, "num_experts": 16, "moe_topk": [8, 8, 4]}
    with pytest.raises(RouterError, match=r"layer 2: .*got top-4 of 16"):
        RoutedModel.from_config(config)
    assert RoutedModel.from_config(config | {"mlp_layer_types": ["sparse", "sparse", "dense"]}).topk == 8


LOOPS: dict[str, dict[str, Any]] = {
    "Inkling-2": {"loop_layer_index_start": 6, "loop_layer_index_end": 18, "loop_num_passes": 3},
    "Inkling-2's own config.json": {"loop_config": {"core_start": 6, "core_end": 18, "num_passes": 3}},
    "Ouro": {"total_ut_steps": 4},
    "LoopCoder": {"loop_num": 2, "loop_window_size": 64},
    "HRM": {"H_cycles": 1, "L_cycles": 3},
}


@pytest.mark.parametrize("family", LOOPS)
def test_a_looped_model_is_refused_by_the_key_that_says_how_often(family: str, tmp_path: Path) -> None:
    looped = QWEN3_30B | LOOPS[family]
    (tmp_path / "config.json").write_text(json.dumps(looped))
    for form in (looped, tmp_path, types.SimpleNamespace(**looped), {"text_config": looped}):
        with pytest.raises(RouterError, match=r"a looped model.*, got [A-Za-z_.]+=[0-9]+"):
            RoutedModel.from_config(form)

    def once(value: Any) -> Any:
        return {key: once(inner) for key, inner in value.items()} if isinstance(value, dict) else 1

    assert RoutedModel.from_config(QWEN3_30B | once(LOOPS[family])) == RoutedModel.from_config(QWEN3_30B)


@pytest.mark.parametrize(
    "keys",
    [
        {"loop_layer_index_start": 6, "loop_gate_rank": 64, "loop_num_passes": 1},
        {"num_kv_shared_layers": 15, "recurrent_block_type": "x", "n_recurrent_layers": 12},
        {"loop_num_passes": None, "num_loops": True, "use_loop": True, "loop_config": None},
    ],
)
def test_keys_that_count_no_passes_are_let_be(keys: dict[str, Any]) -> None:
    assert RoutedModel.from_config(QWEN3_30B | keys) == RoutedModel.from_config(QWEN3_30B)


LAYERS = {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("config", "hybrid", "windows"),
    [
        ({}, False, False),
        ({"layer_types": None}, False, False),
        ({"full_attention_interval": 4}, True, False),
        ({"layer_types": ["conv", "full_attention"] * 4}, True, False),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, False, True),
        ({"layer_types": ["chunked_attention", "full_attention"] * 4}, False, True),
        ({"layer_types": ["sliding_attention"] * 8}, False, False),
        ({"layer_types": ["full_attention"] * 8}, False, False),
        ({"attn_type_list": [0, 1] * 4}, True, False),
        ({"attn_type_list": [1] * 8}, False, False),
        ({"layer_group_size": 4}, True, False),
        ({"layer_group_size": 1}, False, False),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}}, True, False),
        ({"linear_attn_config": {"kda_layers": [], "full_attn_layers": [1]}}, False, False),
        ({"hybrid_override_pattern": NEMOTRON_PATTERN}, True, False),
        ({"text_config": {"full_attention_interval": 4}}, True, False),
        ({"llm_config": {"hybrid_override_pattern": NEMOTRON_PATTERN}}, True, False),
        ({"thinker_config": {"text_config": {"full_attention_interval": 4}}}, True, False),
    ],
    ids=str,
)
def test_a_family_whose_layers_are_of_several_kinds_is_told(
    config: dict[str, Any], hybrid: bool, windows: bool
) -> None:
    """Hybrid as the class of each in vLLM's source says it (IsHybrid), or with a window beside others."""
    model = LAYERS | config
    assert (is_hybrid(model), has_windows(model)) == (hybrid, windows)
