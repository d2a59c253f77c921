"""Try every MoE family of the installed transformers and rewrite its table in both pages of models.

    python ci/models.py                 # rewrite the table of this transformers, 5 or 4
    python ci/models.py mixtral doge    # try these and print their rows
    PYTHONPATH=.work/transformers/4.57.6 python ci/models.py

Each family is built small with random weights and run on the CPU. «works» means: a recording changes neither
output nor gradients, its replay repeats both bit for bit, and after the routers' weights were changed the
experts are still called with the recorded ids; where they are given no ids, each with as many rows as the
routes send it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pages
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import npu_replay
from npu_replay import ReplayError, routers

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = DOCS / "models.md", DOCS / "zh" / "models.md"
MAJOR = int(transformers.__version__.split(".")[0])
MARKS = f"<!-- transformers {MAJOR}: written by ci/models.py -->", f"<!-- end of transformers {MAJOR} -->"

TOKENS = 2, 8
LAYERS = 4
EXPERTS = 8

# What a number of a config becomes, by its name; the first that matches, and never more than it was.
SMALL = (
    (r"vocab_size", 128),
    (r"num_experts_per_tok|moe_top_?k|moe_k$|top_k_experts", 2),
    (r"^(moe_)?(num|n)_(local_|routed_)?experts$", EXPERTS),
    (r"^n_group$|num_expert_group", 2),
    (r"^topk_group$", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_hash_layers|zero_expert_num", 1),
    (r"(num|n)_(attention_|linear_)?heads|attention_heads|_(num|n)_heads$|linear_num_\w+_heads", 4),
    (r"qk_head_dim$", 16),
    (r"head_dim$|_dim_head", 8),
    (r"rank$", 16),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size)(_\w+)?$", 16),
    (r"hidden_size|d_model|embed_dim|emb_dim", 32),
    (r"num_hidden_layers|num_layers|n_layers|^depth$|encoder_layers|decoder_layers", LAYERS),
)

# What a config makes by itself.
DERIVED = ("per_layer_config", "id2label", "label2id", "dtype", "transformers_version", "architectures")

# Where that isn't enough: numbers that hang together, and families that are dense unless asked.
# A key with a dot is in a sub-config.
_GEMMA = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 16}
SPECIAL: dict[str, dict[str, Any]] = {
    # Its config's own default is no list of layer types, which its model can't do with.
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "text_config.num_experts_per_tok": 2,
    },
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0, "ffn_config.moe_top_k": 2},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "diffusion_gemma": {f"text_config.{name}": value for name, value in _GEMMA.items()},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {
        "text_config.moe_intermediate_size": [16, 16],
        "text_config.rope_parameters.mrope_section": [1, 1, 2],
    },
    "gemma4": _GEMMA,
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 0]},
    "granitemoehybrid": {"mamba_d_head": 16, "mamba_d_state": 16},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": 2, "head_dim": 8},
    "hy_v4_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "inkling2_loop": {
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "n_layers_per_attn_res_block": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mistral4": {"head_dim": 16},
    "nemotron_h": {"n_groups": 2, "ssm_state_size": 16},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {"text_config.sliding_window": 8},
}

# The same in 4, whose configs have other keys.
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
SPECIAL_OF_4: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"moe_num_experts": EXPERTS, "moe_top_k": 2, "ffn_hidden_size": 16},
    },
    "glm4v_moe": {"text_config.rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
    "granitemoehybrid": SPECIAL["granitemoehybrid"] | {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "jamba": {"use_mamba_kernels": False},
    "qwen3_omni_moe": {"text_config.rope_scaling": _MROPE},
    "qwen3_vl_moe": {"text_config.rope_scaling": _MROPE},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str
    router: str
    verdict: str


def families() -> list[str]:
    """The names of transformers' model folders that have experts."""
    kind = r"(?m)^class \w*(Router|Gating|Experts|MoE|Moe|MoeBlock|MoELayer)\(nn\.(Module|Linear)\)"
    names = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        code = file.read_text(encoding="utf-8")
        if "experts" in code and re.search(kind, code):
            names.append(file.parent.name)
    return names


def build(family: str) -> PreTrainedModel:
    """A small model of this family, with random weights."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module.__name__
        and "PreTrained" not in kind.__name__
    ]
    endings = (r"ForCausalLM", r"ForConditionalGeneration", r"For\w+", r"TextModel", r"Model", r"")
    kind = next(kind for ending in endings for kind in kinds if re.search(f"{ending}$", kind.__name__))
    config = kind.config_class()
    small = _shrunk(config.to_dict())
    for name, value in (SPECIAL | SPECIAL_OF_4 if MAJOR == 4 else SPECIAL).get(family, {}).items():
        *inside, last = name.split(".")
        functools.reduce(dict.__getitem__, inside, small)[last] = value
    small["use_cache"] = False  # some hybrid caches can't do without the layers that are left out here
    torch.manual_seed(0)
    return kind(type(config).from_dict(small)).eval()


def _shrunk(numbers: dict[str, Any]) -> dict[str, Any]:
    layers = next((numbers[n] for n in ("num_hidden_layers", "num_layers", "n_layers") if numbers.get(n)), 0)
    small = {}
    for name, value in numbers.items():
        if name in DERIVED:
            continue
        if isinstance(value, dict) and "rope" not in name:
            small[name] = _shrunk(value)
        elif isinstance(value, (list, tuple)) and layers > LAYERS and len(value) == layers:
            continue  # one entry a layer: the config makes its own for fewer
        elif isinstance(value, bool) or not isinstance(value, int):
            small[name] = value
        elif re.search(r"num_key_value_heads|kv_heads", name):
            latent = "kv_lora_rank" in numbers or value == numbers.get("num_attention_heads")
            small[name] = 4 if latent else min(value, 2)
        elif name.endswith("token_id") and value > 100:
            small[name] = 100 + sum(map(ord, name)) % 27
        else:
            fitting = (min(value, number) for pattern, number in SMALL if re.search(pattern, name))
            small[name] = next(fitting, value)
    return small


def attempt(family: str) -> Row:
    """Record and replay with a small model of this family; say what came of it."""
    model = build(family)
    kinds = {type(module).__name__ for module in model.modules()}
    names = {name for name in kinds if re.search(r"(Router|TopKGating|MoEV1Gate|MoEGate)$", name)}
    try:
        npu_replay.record(model).__enter__().__exit__(KeyboardInterrupt, None, None)
    except ReplayError as error:
        return Row(family, ", ".join(sorted(names)), f"refused on entering: {error.problem}")
    names |= {type(router.module).__name__ for router in routers.find([model])[0] if router.shows is None}
    try:
        verdict = _verdict(model)
    except ReplayError as error:
        verdict = f"refused in the first forward: {error.problem}"
    return Row(family, ", ".join(sorted(names)), verdict)


def _verdict(model: PreTrainedModel) -> str:
    inputs = {"input_ids": torch.randint(1, 90, TOKENS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    plain = _run(model, inputs)
    with npu_replay.record(model) as recording:
        recorded = _run(model, inputs)
    with npu_replay.replay(model, recording.routes):
        replayed = _run(model, inputs)
    if not _same(plain, recorded) or not _same(recorded, replayed):
        return "WRONG: output or gradients differ"
    model_routers = routers.find([model])[0]
    with torch.no_grad():
        for weight in (weight for router in model_routers for weight in router.module.parameters()):
            weight.add_(torch.randn_like(weight))
    with npu_replay.replay(model, recording.routes), _watched(model, model_routers) as seen:
        changed = _run(model, inputs)
    wanted = {router.label: recording.routes[0].layer_ids(router.label).long() for router in model_routers}
    # Llama 4's experts are given every token.
    dense = not seen and all(router.topk == 1 for router in model_routers)
    if not dense and (seen.keys() != wanted.keys() or not all(_is(seen[at], wanted[at]) for at in wanted)):
        return "WRONG: the experts were given other ids than the routes"
    if torch.equal(changed[0], _run(model, inputs)[0]):
        return "WRONG: the routes have no effect"
    return "works"


@contextlib.contextmanager
def _watched(model: nn.Module, model_routers: list[routers.Router]) -> Iterator[dict[int, torch.Tensor]]:
    """What each layer's experts are called with: int64 [rows, topk], ids; or [experts], how many rows."""
    seen: dict[int, torch.Tensor] = {}

    def look(router: routers.Router, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 2:
                seen[router.label] = value
            elif isinstance(value, (torch.Tensor, list)) and len(value) == router.num_experts:
                seen.setdefault(router.label, torch.as_tensor(value).long())

    def count(layer: int, expert: int, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen[layer][expert] += args[0].numel() // args[0].shape[-1]

    with contextlib.ExitStack() as hooks:
        for router in model_routers:
            block = router.module if router.shows is None else None
            if not hasattr(block, "experts"):
                block = model.get_submodule(router.path.rpartition(".")[0])
            experts = block.experts if hasattr(block, "experts") else block.input_linear
            if not isinstance(experts, nn.ModuleList):
                act = functools.partial(look, router)
                hooks.callback(experts.register_forward_pre_hook(act, with_kwargs=True).remove)
                continue
            seen[router.label] = torch.zeros(len(experts), dtype=torch.int64)
            for number, expert in enumerate(experts):
                act = functools.partial(count, router.label, number)
                hooks.callback(expert.register_forward_pre_hook(act).remove)
        yield seen


def _is(seen: torch.Tensor, ids: torch.Tensor) -> bool:
    """Is what the experts of a layer were called with what these ids [rows, topk] say?"""
    if seen.dim() == 1:
        return torch.equal(seen, ids.flatten().bincount(minlength=len(seen))[: len(seen)])
    return torch.equal(seen.sort().values, ids.sort().values)


def _run(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """The output and every gradient."""
    model.zero_grad()
    output = model(**inputs)[0]
    output.float().square().mean().backward()
    return [output.detach(), *(None if w.grad is None else w.grad.clone() for w in model.parameters())]


def _same(outcome: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    return len(outcome) == len(other) and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(outcome, other, strict=True)
    )


def told(rows: Sequence[Row]) -> str:
    """Return what the page says: the families that work in one line, and a table of the others."""
    works = [f"`{row.family}`" for row in rows if row.verdict == "works"]
    about = f"transformers {transformers.__version__}: {len(works)} of {len(rows)} families work"
    others = (astuple(row) for row in rows if row.verdict != "works")
    return f"{about}: {', '.join(works)}.\n\n{pages.table(['family', 'router', 'what came of it'], others)}"


def main(names: list[str]) -> int:
    """Return 1 if a family went wrong without an error: that must never be."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for family in names or families():
        rows.append(attempt(family))
        print(pages.line(astuple(rows[-1])), flush=True)
    if not names:
        for page in PAGES:
            pages.rewrite(page, MARKS, told(rows))
    return int(any(row.verdict.startswith("WRONG") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
