"""Reads from a verl job's config which layers the stages of the actor's pipeline have."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from npu_replay.compat.megatron.parallel_state import decoder_layers
from npu_replay.compat.verl.settings import ROOT, setting
from npu_replay.errors import ReplayError
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.pipeline_layers import DecoderLayers
from npu_replay.rollout.model_config import RoutedModel

logger = logging.getLogger(__name__)

_LAYOUT = "pipeline_model_parallel_layout"
_NOTHING = dict.fromkeys(
    (
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", _LAYOUT),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    )
)
"""The fields of a TransformerConfig about a split, which an override may leave out."""


def cut_of(config: Any, model: RoutedModel) -> Any:
    """Return the `cut` of a carrier: a piece a stage; even ones, with a WARNING, if it is unknown."""
    megatron = setting(config, ROOT, "actor", "megatron")
    pp, vp = (int(setting(megatron, f"{name}pipeline_model_parallel_size") or 1) for name in ("", "virtual_"))
    try:
        decoder = _decoder(dict(setting(megatron, "override_transformer_config") or {}), pp, model)
        stages = ParallelLayout(
            pp=pp, vp=vp if decoder.table is None else len(decoder.table[0]), decoder=decoder
        )
        stages.moe_layers  # noqa: B018  raises if they can't be dealt out
    except (ReplayError, ImportError, AssertionError, TypeError, ValueError) as error:
        even = -(-len(model.layers) // max(1, pp * vp))
        said = (
            "[npu_replay] rollout: routes are put away in pieces of %d layers, and a stage may need two, "
            "since the split of the actor's pipeline isn't known: %s"
        )
        logger.warning(said, even, error)
        return even
    return stages


def _decoder(override: dict[str, Any], pp: int, model: RoutedModel) -> DecoderLayers:
    """Return the decoder layers of a TransformerConfig with this override; raises Megatron's assertions."""
    moe = [int(layer in model.layers) for layer in range(model.num_layers)]
    told = {"num_layers": model.num_layers, "num_moe_experts": model.num_experts, "moe_layer_freq": moe}
    given = SimpleNamespace(**told | _NOTHING | override)
    if (layout := getattr(given, _LAYOUT)) is not None:
        from megatron.core.transformer import pipeline_parallel_layer_layout as layouts

        stages = layout if isinstance(layout, str) else [list(stage) for stage in layout]
        given.pipeline_model_parallel_layout = layouts.PipelineParallelLayerLayout(stages, pp)
    return decoder_layers(given)
