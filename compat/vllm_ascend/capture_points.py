"""Pass the experts that a worker's layers choose to a capture.

Asks:     the model for its layers, and who holds `select_experts`; another patch of it is refused.
Changes:  `MoECommMethod.prepare`, the capturer's `capture`, to 0.26 `select_experts` and each layer's run.
Undone:   with the group of patches that `install` is given.

To 0.26 every way of quantizing calls `select_experts`, and only one of them calls vLLM's capturer; so it is
replaced wherever it is bound, and a wrapper of each layer's run gives the layer's number. From 0.27 on vLLM's
own binder reaches every router. In both, `prepare` shows how a layer's tokens come in.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Layout
from npu_replay.compat.vllm_ascend.self_check import Choice
from npu_replay.errors import ReplayError

_SELECTORS = ("vllm_ascend.ops.fused_moe.experts_selector", "vllm_ascend._310p.fused_moe.experts_selector")
_NAME = "select_experts"


def layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return a model's modules that route, by decoder layer: vLLM's FusedMoE, from 0.24 on its MoERunner."""
    routed_layers: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(type(module), "layer_id") and hasattr(module, "moe_config"):
            number = module.layer_id
            if number in routed_layers:
                raise ReplayError(
                    f"two modules route for layer {number}",
                    where=name,
                    expected="one in each decoder layer",
                    got=f"{type(routed_layers[number]).__name__} and {type(module).__name__}",
                    cause="a model with a draft, or a second tower of experts, inside",
                )
            routed_layers[number] = module
    return routed_layers


class CapturePoints:
    """Passes each choice of the target model's layers to a capture."""

    def __init__(
        self, capture: Capture, modules: Mapping[int, torch.nn.Module], tp: Any, parallel: Any
    ) -> None:
        from vllm.forward_context import get_forward_context
        from vllm_ascend.ascend_forward_context import _EXTRA_CTX

        self._capture = capture
        self._modules = modules
        self._tp = tp
        self._parallel = parallel
        self._extra = _EXTRA_CTX
        self._context = get_forward_context
        self._layer: int | None = None

    def install(self, patches: Patches, capturer: Any, selects: bool) -> None:
        """Install what reaches every choice; `selects`: `select_experts` chooses, past the capturer."""
        from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

        patches.wrap(MoECommMethod, "prepare", self._prepare, "how a layer's tokens come in")
        if not selects:
            patches.set(capturer, "capture", self._from_router, "places rows by the way of communication")
            return
        # Silenced, as the one way of quantizing that calls it would write its rows twice.
        patches.set(capturer, "capture", lambda **_: None, "reached another way, for every quantization")
        for number, module in self._modules.items():
            run = "_forward_impl" if hasattr(module, "_forward_impl") else "forward_impl"
            patches.wrap(module, run, self._in_layer(number), "which layer chooses")
        for function, holders in selectors():
            for holder in holders:
                patches.set(holder, _NAME, self._choosing(function), "the experts of every quantization")

    # ---- wrappers around vllm-ascend's functions

    def _prepare(self, original: Callable[..., Any], comm: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(comm, *args, **kwargs)
        self._capture.enter(
            kwargs["router_logits"] if "router_logits" in kwargs else args[1],
            sharded=bool(kwargs.get("replace_allreduce")),
            # 0.26 takes it as an argument, and ignores it.
            keeps_all=bool(getattr(comm.prepare_finalize, "enable_shared_expert_dp", False)),
        )
        return made

    def _in_layer(self, number: int) -> Callable[..., Any]:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._layer = number
            self._capture.entry = None
            try:
                return original(*args, **kwargs)
            finally:
                self._layer = None

        return run

    def _choosing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # for `parts`, where a second engine of this process is made
        def select_experts(*args: Any, **kwargs: Any) -> Any:
            weights, ids = original(*args, **kwargs)
            if self._layer is not None:
                self._take(self._layer, ids, kwargs.get, kwargs.get("router_logits"))
            return weights, ids

        return select_experts

    def _from_router(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        module = self._modules.get(layer_id)
        if module is not None:
            self._take(layer_id, topk_ids, lambda name: getattr(module.router, name, None), None)

    def _take(
        self, layer: int, ids: torch.Tensor, says: Callable[[str], Any], logits: torch.Tensor | None
    ) -> None:
        """Pass a choice to the capture; `says` returns its settings by their names in vLLM."""
        if self._extra.in_profile_run:
            return
        capture = self._capture
        entry = self._capture.entry
        context = self._context()
        before = entry is None
        if entry is None:  # the overlap gate chooses before `prepare`, from the incoming rows
            if logits is None:
                capture.fail(
                    ReplayError(
                        "a layer chose experts of unknown tokens",
                        where=f"vllm-ascend, layer {layer}",
                        expected="MoECommMethod.prepare before the choice",
                        got="a choice alone",
                        cause="an unknown way through it",
                    )
                )
                return
            entry = capture.enter(logits, sharded=bool(self._extra.flash_comm_v1_enabled), keeps_all=True)
        spread = self._parallel.data_parallel_size > 1
        layout = Layout(
            comm="none" if before else self._extra.moe_comm_type.name.lower(),
            tokens=self._extra.num_tokens,
            entered=entry.rows,
            sharded=entry.sharded,
            keeps_all=entry.keeps_all,
            tp_rank=self._tp.rank_in_group,
            tp_size=self._tp.world_size,
            dp_rank=self._parallel.data_parallel_rank,
            across_dp=tuple(context.dp_metadata.num_tokens_across_dp_cpu.tolist()) if spread else (),
        )
        compares = context.cudagraph_runtime_mode.name == "NONE" and capture.check.compares
        capture.take(layer, ids, choice(says) if compares else None, layout)


def choice(says: Callable[[str], Any]) -> Choice | None:
    """Return how experts are chosen, if by a top-k of the logits; None for a function or a table of ids."""
    groups = says("num_expert_group") or 1
    kept = says("topk_group") or 1
    own = any(says(name) is not None for name in ("custom_routing_function", "tid2eid", "bias_vl"))
    if own or says("top_k") is None or says("scoring_func") is None:
        return None
    return Choice(says("top_k"), says("scoring_func"), says("e_score_correction_bias"), groups, kept)


def selectors() -> Iterator[tuple[Callable[..., Any], list[ModuleType]]]:
    """Yield each function that chooses, with the modules that hold it; refuse one that was replaced."""
    holders: dict[int, list[ModuleType]] = {}
    for name, module in list(sys.modules.items()):  # modules may be any object
        function = getattr(module, "__dict__", {}).get(_NAME)
        if function is None:
            continue
        if name.startswith("vllm_ascend."):
            refuse_foreign(function, ("experts_selector",), f"{name}.{_NAME}")
        holders.setdefault(id(function), []).append(module)
    for home in _SELECTORS:
        function = getattr(sys.modules.get(home), _NAME, None)
        if function is not None:
            yield function, holders[id(function)]


def refuse_foreign(function: Any, files: tuple[str, ...], where: str) -> None:
    """Refuse a function that isn't vllm-ascend's, or vLLM's, own; `files` are the stems of theirs."""
    code = function.__code__ if isinstance(function, FunctionType) else None
    own = code is not None and Path(code.co_filename).stem.removeprefix("patch_") in files
    if not own or hasattr(function, "__wrapped__"):
        raise ReplayError(
            "somebody else has replaced this function",
            where=where,
            expected=f"that of {files[0]}.py",
            got=f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}",
            cause="another patch that captures routes: take it out, or leave NPU_REPLAY_VLLM_ASCEND away",
        )
