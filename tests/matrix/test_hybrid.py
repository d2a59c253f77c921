"""HybridModel (MambaModel up to 0.17) on the Megatron-core on the path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npu_replay
from dealt_cases import dealt
from zoo import hybrid
from zoo.gpt import DEVICE, VARIANTS, Trainer, check_foreign_routes

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.capability("hybrid"),
]

PATTERNS = {
    # pattern: its Hugging Face config, and layer_number and decoder layer of each router
    "*-*E*E": ({"num_hidden_layers": 3, "first_k_dense_replace": 1}, {4: 1, 6: 2}),
    "MEM*E-ME": ({"num_hidden_layers": 8, "hybrid_override_pattern": "MEM*E-ME"}, {2: 1, 5: 4, 8: 7}),
}
ROWS = 9


def built(pattern: str, *, again: bool = False, variant: str = "softmax_after_topk") -> Trainer:
    """The same weights at each call."""
    if why := hybrid.missing(pattern):
        pytest.skip(why)
    torch.manual_seed(7)
    config = hybrid.config(pattern, **VARIANTS[variant], **(hybrid.recompute() if again else {}))
    return Trainer(hybrid.model(config, pattern).to(DEVICE), None)


@pytest.mark.parametrize(
    ("variant", "pattern"),
    [
        case[:2]
        for case in dealt(["softmax_after_topk", "groups_sigmoid_bias", "aux_loss"], [*PATTERNS], [None])
    ],
)
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    pattern: str, variant: str
) -> None:
    trainer = built(pattern, again=True, variant=variant)
    check_foreign_routes(trainer, built(pattern, variant=variant), "sum")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_engines_rows_reach_the_routers_of_their_layers(pattern: str) -> None:
    """Megatron's numbers and the config's stand side by side in PATTERNS; hooks of this test's own look."""
    model = built(pattern).model
    config, layer_of = PATTERNS[pattern]
    tokens = torch.arange(ROWS).view(1, ROWS)
    engine = npu_replay.RoutedModel.from_config({"num_experts": 8, "num_experts_per_tok": 2, **config})
    rows = np.random.default_rng(0).random((ROWS - 1, len(engine.layers), 8)).argsort(-1)[..., :2]
    ids = tokens[0].tolist()
    choice = {"prompt_token_ids": ids[:3], "token_ids": ids[3:], "routed_experts": rows.tolist()}
    (routes,) = npu_replay.from_vllm({"choices": [choice | {"index": 0, "finish_reason": "length"}]}, engine)
    assert routes.layers == tuple(layer_of.values())
    shown: dict[int, torch.Tensor] = {}
    for layer in model.decoder.layers:
        if (router := getattr(getattr(layer, "mlp", None), "router", None)) is not None:
            router.register_forward_hook(lambda one, _, out: shown.update({one.layer_number: out[1].cpu()}))
    with npu_replay.replay(model, [routes]):
        Trainer(model, None).loss(tokens.to(DEVICE)).backward()
    assert list(shown) == list(layer_of)
    for column, routing_map in enumerate(shown.values()):
        found = [row.nonzero()[:, 0].tolist() for row in routing_map[: ROWS - 1]]
        assert found == np.sort(rows[:, column]).tolist()
