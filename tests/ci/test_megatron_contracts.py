"""What npu_replay leans on in Megatron-core's source: the release on the path keeps it, and a change is seen.

One change for each contract of ci/contracts.toml, such as a next release might bring.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.megatron

CI = Path(__file__).parents[2] / "ci"
CORE = "megatron/core/"
ROUTER = "megatron/core/transformer/moe/router.py"
FUNCTIONS = "megatron/core/transformer/moe/moe_utils.py"
REPLAY = "megatron/core/transformer/moe/router_replay.py"
CONFIG = "megatron/core/transformer/transformer_config.py"

CHANGES = [
    ("router", ROUTER, "self.layer_number = layer_number", "self.layer_idx = layer_number"),
    ("router", ROUTER, "self.routing(logits", "self.route(logits"),
    ("router", ROUTER, "self.topk = ", "self.num_chosen = "),
    ("top-k in one", FUNCTIONS, "torch.topk(scores, k=topk, dim=1)", "own_topk(scores, topk)"),
    ("top-k in one", FUNCTIONS, "return topk_masked_gates, topk_map, tokens", "return topk_map, tokens"),
    ("top-k apart", FUNCTIONS, "torch.topk(scores, k=topk", "own_topk(scores, k=topk"),
    ("top-k apart", FUNCTIONS, "def apply_router_token_dropping(", "def drop_tokens("),
    ("groups", FUNCTIONS, "scores.masked_fill(~score_mask.bool(), float('-inf'))", "scores * score_mask"),
    ("sinkhorn", ROUTER, "torch.topk(norm_logits", "own_topk(norm_logits"),
    ("quantiles", FUNCTIONS, ".topk(k + 1, dim=1)", ".topk(k, dim=1)"),
    ("fused router", FUNCTIONS, "return fused_topk_with_score_function(", "return fused.topk("),
    ("fused router", CONFIG, "moe_router_fusion: bool", "moe_fused_router: bool"),
    (
        "padding mask",
        ROUTER,
        "self._apply_expert_bias(routing_map, padding_mask=",
        "self._count(routing_map, mask=",
    ),
    ("losses by partial", ROUTER, "load_balancing_loss_func=aux_loss_func", "loss=aux_loss_func"),
    ("losses of the replay", ROUTER, "tokens_per_expert=tokens_per_expert", "tokens_per_expert=live.sum(0)"),
    ("losses of the live", FUNCTIONS, "return routing_map, scores", "return scores, routing_map"),
    ("losses of the live", ROUTER, "routing_map=loss_routing_map", "routing_map=routing_map"),
    ("losses by map", ROUTER, "def _apply_seq_aux_loss(", "def _seq_loss("),
    ("losses by map", ROUTER, "def is_aux_loss_enabled(", "def has_aux_loss("),
    ("RouterReplay", REPLAY, "def get_replay_topk(", "def compute_topk("),
    ("RouterReplay", FUNCTIONS, "router_replay.get_replay_topk(", "router_replay.topk("),
    ("RouterReplay", CONFIG, "moe_enable_routing_replay: bool", "moe_routing_replay: bool"),
    ("static buffers", REPLAY, "def set_static_buffer(", "def set_buffer("),
    ("numbered replay", REPLAY, "self.layer_number", "self.layer"),
    ("config", CONFIG, "@dataclass\nclass TransformerConfig", "class TransformerConfig"),
    ("config", CONFIG, "moe_expert_capacity_factor", "moe_capacity_factor"),
    ("config", f"{CORE}model_parallel_config.py", "    sequence_parallel: bool", "    sp: bool"),
    ("model", f"{CORE}models/gpt/gpt_model.py", "self.decoder = ", "self.blocks = "),
    ("model", f"{CORE}models/gpt/gpt_model.py", "self.mtp = ", "self.multi_token = "),
    (
        "model",
        f"{CORE}transformer/transformer_layer.py",
        "self.mlp.set_layer_number(self.layer_number)",
        "self.mlp.set_layer_number(layer_number)",
    ),
    (
        "layer tables",
        f"{CORE}transformer/pipeline_parallel_layer_layout.py",
        "self.layout = layout",
        "self.stages = layout",
    ),
    (
        "parallel state",
        f"{CORE}parallel_state.py",
        "def get_tensor_and_context_parallel_group(",
        "def get_tp_cp_group(",
    ),
    ("virtual stages", f"{CORE}pipeline_parallel/utils.py", "def is_vp_last_stage(", "def is_last_stage("),
    ("gathered rows", ROUTER, "gather_from_sequence_parallel_region(logits)", "logits"),
    (
        "flex dispatcher",
        f"{CORE}transformer/moe/token_dispatcher.py",
        "torch.topk(probs, ",
        "own_topk(probs, ",
    ),
    ("CPU", f"{CORE}tensor_parallel/random.py", "def _set_cuda_rng_state(", "def _set_rng_state("),
]


Check = Callable[..., dict[str, list[str] | None]]


@pytest.fixture(scope="module")
def contracts() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        yield importlib.import_module("contracts")


@pytest.fixture(scope="module")
def product(contracts: ModuleType) -> Any:
    return contracts.products((CI / "contracts.toml").read_text(encoding="utf-8"))["megatron-core"]


@pytest.fixture(scope="module")
def check(contracts: Any, product: Any) -> Check:
    """Hold the release on the path to some contracts, or all, some files with other text."""
    try:
        version = contracts.Version(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a source tree doesn't say which release it is")

    read = contracts.read_in(root())

    def check(*names: str, **changed: str) -> Any:
        some = {name: product.contracts[name] for name in names or product.contracts}
        one = dataclasses.replace(product, contracts=some)
        return one.check(version, lambda path: changed.get(path) or read(path))

    return check


def root() -> Path:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[2]


def test_the_release_keeps_its_contracts(check: Check) -> None:
    found = list(check().values())
    assert not any(found)
    assert found.count([]) > 10


@pytest.mark.parametrize(("contract", "file", "before", "after"), CHANGES)
def test_a_change_to_its_source_breaks_that_contract(
    check: Check, contract: str, file: str, before: str, after: str
) -> None:
    path = root() / file
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before not in source or check(contract)[contract] is None:
        pytest.skip("this release does it another way")
    lines = check(contract, **{file: source.replace(before, after)})[contract]
    assert any(f": {file}: " in line for line in lines)


def test_every_contract_has_such_a_change(product: Any) -> None:
    assert {contract for contract, *_ in CHANGES} == product.contracts.keys()
