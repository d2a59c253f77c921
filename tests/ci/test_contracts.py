"""ci/contracts.py: every way in which a release can break a contract is one line, on made-up sources.

The real releases are checked by the script itself, in CI a few (ci/engines.sh), by hand all; here the
Megatron-core on the path, with one change for each of its contracts, such as a next release might bring.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci_module import ci_module

CI = Path(__file__).parents[2] / "ci"
contracts = ci_module("contracts")

CONTRACTS = '''
[engine]
first = "0.13.0"
ci = ["0.14.0"]

[engine.contract.rows]
says = "the rows of a completion"
[[engine.contract.rows.clause]]
since = "0.14.0"
file = "engine/outputs.py"
code = """
class CompletionOutput:
    token_ids: ...
    routed_experts: np.ndarray | None = None
"""

[engine.contract."prompt rows"]
says = "the prompt's rows apart"
[[engine.contract."prompt rows".clause]]
since = "0.21.0"
until = "0.22.0"
file = "engine/outputs.py"
code = """
class RequestOutput:
    prompt_routed_experts: ...
"""

[engine.contract.encoding]
says = "base64 of .npy"
[[engine.contract.encoding.clause]]
since = "0.14.0"
until = "0.28.0"
file = "engine/serving.py"
code = "np.save(buf, output.routed_experts)"
[[engine.contract.encoding.clause]]
since = "0.28.0"
file = "engine/utils.py"
code = """
def numpy2base64(array):
    np.save(..., array, allow_pickle=False)
"""
'''

OUTPUTS = """
class CompletionOutput:
    token_ids: list[int]
    routed_experts: np.ndarray | None = None
"""
SERVING = "def full(output):\n    np.save(buf, output.routed_experts)\n"
UTILS = (
    "def numpy2base64(array, order='C'):\n    with io.BytesIO() as b:\n"
    "        np.save(b, array, allow_pickle=False)\n"
)
OLD = {"engine/outputs.py": OUTPUTS, "engine/serving.py": SERVING}
NEW = {"engine/outputs.py": OUTPUTS, "engine/utils.py": UTILS}


# ---- what a stub says


@pytest.mark.parametrize(
    ("stub", "source", "line"),
    [
        ("class A: ...", "class B: ...", "no class A"),
        ("class A(Base): ...", "class A(Other): ...", "A is no Base"),
        ("@dataclass\nclass A: ...", "@other\nclass A: ...", "A is no @dataclass"),
        (
            "class A:\n  def f(self):\n    g()",
            "class Base:\n  def f(self):\n    g()\nclass A(Base):\n  def f(self): ...",
            "A.f has no `g()`",
        ),
        ("class A:\n  x: int", "class A:\n  y: int", "A has no field x"),
        ("class A:\n  x: int", "class A:\n  x: str", "A.x is of type `str`, not `int`"),
        ("class A:\n  x: int = 0", "class A:\n  x: int = 1", "A.x is `1` by default, not `0`"),
        ("class A:\n  x: int = 0", "class A:\n  x: int", "A.x is nothing by default, not `0`"),
        ("class A:\n  def f(self): ...", "class A: ...", "A has no method f"),
        ("def f(a): ...", "def g(a): ...", "no function f"),
        ("def f(a): ...", "def f(b=0): ...", "f has no argument a"),
        ("def f(a): ...", "def f(a, b): ...", "f wants an argument b"),
        ("def f(a=0): ...", "def f(a=1): ...", "f has a `1` by default, not `0`"),
        ("def f(a, b): ...", "def f(b, a): ...", "f has its arguments in another order: b, a"),
        ("def f():\n  g(1)", "def f():\n  g(2)", "f has no `g(1)`"),
        ("def f():\n  g(...)", "def f():\n  h(1)", "f has no `g(...)`"),
        ("def f():\n  g(1, ...)", "def f():\n  g(2, 3)", "f has no `g(1, ...)`"),
        ("def f():\n  g(..., k=1)", "def f():\n  g(0, k=2)", "f has no `g(..., k=1)`"),
        (
            "def f():\n  a(...)\n  b(...)",
            "def f():\n  b()\n  a()",
            "f has `b(...)` before `a(...)`, not after it",
        ),
        ("from m import a", "from m import b", "it doesn't import a from m"),
        ("a.b", "a.c", "the module has no `a.b`"),
        ("x: ...", "y = 1", "no name x"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(stub: str, source: str, line: str) -> None:
    assert contracts.differences(stub, source) == [line]


@pytest.mark.parametrize(
    ("stub", "source"),
    [
        ("class A:\n  x: ...", "class A:\n  def __init__(self):\n    self.x = 1"),
        ("class A:\n  x: ...", "class Base:\n  x: int = 0\nclass A(Base): ..."),
        ("@dataclass\nclass A: ...", "@final\n@dataclass\nclass A: ..."),
        (
            "class A:\n  def f(self):\n    g()",
            "class Base:\n  def f(self): ...\nclass A(Base):\n  def f(self):\n    g()",
        ),
        ("class A:\n  x: ... = 0", "if True:\n  class A:\n    x: int = 0"),
        ("def f(a): ...", "async def f(a, b=1, *, c=2): ..."),
        ("def f(a, **_): ...", "def f(self, a, b): ..."),
        ("def f(): ...", "@overload\ndef f(a): ...\ndef f(): ..."),
        ("def f():\n  x = g(...)", "def f():\n  if 1:\n    x = g(1, two=2)"),
        ("def f():\n  a(...)\n  b(...)", "def f():\n  a()\n  b()\n  a()"),
        ("def f():\n  ...((n, k), ..., dtype=d)", "def f():\n  self.x = zeros((n, k), dtype=d, device=0)"),
        ("from m import a", "def f():\n  from m import b, a as c"),
    ],
)
def test_what_is_there_in_another_guise_is_found(stub: str, source: str) -> None:
    assert contracts.differences(stub, source) == []


# ---- what a release is held to


KEPT = {"rows": [], "prompt rows": None, "encoding": []}


@pytest.mark.parametrize(
    ("version", "files", "found"),
    [
        ("0.20.0", OLD, {}),
        ("0.34.0", NEW, {}),  # a release of tomorrow is held to the newest range
        ("0.28.0rc1", OLD, {}),  # a candidate comes before its release
        (
            "0.34.0",
            NEW | {"engine/outputs.py": OUTPUTS.replace("routed_experts", "expert_ids")},
            {"rows": ["engine/outputs.py: CompletionOutput has no field routed_experts"]},
        ),
        ("0.34.0", {"engine/outputs.py": OUTPUTS}, {"encoding": ["engine/utils.py: no such file"]}),
        (
            "0.34.0",
            NEW | {"engine/outputs.py": OUTPUTS + "class RequestOutput:\n    prompt_routed_experts: list\n"},
            {
                "prompt rows": [
                    "engine/outputs.py: holds «prompt rows» as releases from 0.21.0 to before 0.22.0"
                ]
            },
        ),
        (
            "0.34.0",
            NEW | OLD,
            {"encoding": ["engine/serving.py: holds «encoding» as releases from 0.14.0 to before 0.28.0"]},
        ),
    ],
)
def test_what_a_release_is_held_to(version: str, files: dict[str, str], found: dict[str, list[str]]) -> None:
    """Of a line what is before « do, »."""
    engine = contracts.products(CONTRACTS)["engine"]
    checked = engine.check(contracts.Version(version), files.get)
    lines = {
        name: those and [line.partition(" do, ")[0] for line in those] for name, those in checked.items()
    }
    wanted = {name: [f"engine {version}: {line}" for line in those] for name, those in found.items()}
    assert lines == KEPT | wanted


# ---- Megatron-core

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
    ("dynamic inference", f"{CORE}inference/inference_request.py", "routing_indices: ", "routes: "),
    ("CPU", f"{CORE}tensor_parallel/random.py", "def _set_cuda_rng_state(", "def _set_rng_state("),
]

Check = Callable[..., dict[str, list[str] | None]]


@pytest.fixture(scope="module")
def product() -> Any:
    return contracts.products((CI / "contracts.toml").read_text(encoding="utf-8"))["megatron-core"]


@pytest.fixture(scope="module")
def held(product: Any) -> Check:
    """Hold the release on the path to some contracts, or all, some files with other text."""
    try:
        version = contracts.Version(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a source tree doesn't say which release it is")

    read = contracts.read_in(root())

    def held(*names: str, **changed: str) -> Any:
        some = {name: product.contracts[name] for name in names or product.contracts}
        one = dataclasses.replace(product, contracts=some)
        return one.check(version, lambda path: changed.get(path) or read(path))

    return held


def root() -> Path:
    return Path(find_spec("megatron.core").origin).parents[2]


@pytest.mark.megatron
def test_the_release_keeps_its_contracts(held: Check) -> None:
    found = list(held().values())
    assert not any(found)
    assert found.count([]) > 10


@pytest.mark.megatron
@pytest.mark.parametrize(("contract", "file", "before", "after"), CHANGES)
def test_a_change_to_its_source_breaks_that_contract(
    held: Check, contract: str, file: str, before: str, after: str
) -> None:
    path = root() / file
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before not in source or held(contract)[contract] is None:
        pytest.skip("this release does it another way")
    lines = held(contract, **{file: source.replace(before, after)})[contract]
    assert any(f": {file}: " in line for line in lines)


@pytest.mark.megatron
def test_every_contract_has_such_a_change(product: Any) -> None:
    assert {contract for contract, *_ in CHANGES} == product.contracts.keys()
