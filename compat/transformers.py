"""Describes the mixture-of-experts models of Hugging Face transformers.

A router is recognised by what it is, not by its family: a module named as one, with a top-k and a number of
experts, whose code calls a top-k. Where a block of experts has no such module (in 4 most have none), the
block is the router. docs/models.md lists the result for every family.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from npu_replay.compat import peft
from npu_replay.environment import AUX_LOSS
from npu_replay.errors import NoEffect, RouterError, described
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import Router, RouterKind

_PACKAGES = (
    *("transformers.models.", "transformers_modules.", "verl.models.transformers."),
    "unsloth_compiled_module",
)
"""Also code that came with a checkpoint, classes by which verl replaces some on an NPU, and those that
Unsloth's compiler rewrites.
"""
_ROUTER_NAME = re.compile(r"(Router|Gate|Gating)$")
_SORTS = "TopKGating"
"""The suffix of routers whose output has tokens sorted by expert, and no ids (JetMoE; Granite in 4)."""
_HASH_NAME = re.compile(r"Hash\w*Router$")
_DECODER_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_TOPK = ("top_k", "topk", "moe_top_k")
_EXPERTS = ("num_experts", "n_routed_experts", "moe_num_experts")
_LOGITS = "output_router_logits"
_DEPTH = ("num_hidden_layers", "num_layers", "n_layer")
_GROUPS = ("num_group", "n_group", "num_expert_groups")
"""Group-limited routing masks the scores of other groups; a router with one group masks nothing."""


class TransformersRouters(RouterKind):
    """Recognises router modules and blocks without one; refuses by name every other choice of experts."""

    def variant(self, model: nn.Module) -> Callable[[], Mapping[str, object]]:
        """Return a function that tells which PEFT adapters run, and whether the model generates."""
        adapters = peft.adapters(model)

        def generates() -> bool:
            """Return whether transformers' generation is the caller, which may run without a cache.

            This is a hack: no argument of the call tells, so the frames of the callers are searched.
            """
            frame = sys._getframe(1).f_back
            while frame is not None:
                if frame.f_globals.get("__name__", "").startswith("transformers.generation."):
                    return True
                frame = frame.f_back
            return False

        return lambda: {"adapters": adapters(), "generate()": generates()}

    def check_losses(self, chunk: nn.Module, call: Mapping[str, object]) -> None:
        """Refuse to return the routers' logits: the models' loss takes a top-k of these itself."""
        asked = call.get(_LOGITS)
        if asked is None:  # the config of the model, or of its text model, decides
            parts = [part for _, _, part in ModuleTree.of(chunk).where(_has_config)]
            asking = (part for part in parts if getattr(vars(part).get("config"), _LOGITS, False))
            asked = any(_vendor_class(part) is not None for part in asking)
        RouterError.unless(
            not asked,
            "the aux loss of transformers can't count replayed experts",
            f"aux_loss='live', no {AUX_LOSS}; or {_LOGITS}=False, and a loss of one's own",
            f"a call with {_LOGITS}: the loss takes a top-k of the routers' logits, their own choice",
            where=f"the call of {type(chunk).__name__}",
        )

    def labelled(self, chunk: ModuleTree, routers: list[Router]) -> list[Router]:
        """Add the model's depth, and the layer numbers of a pipeline stage.

        Refuses a model in which only some blocks of experts have a known router.
        """
        if not any(_vendor_class(router.module) for router in routers):
            return routers
        configs = {path: part.config for _, path, part in chunk.where(_has_config)}
        routers = [
            _placed(chunk, configs, router) if _vendor_class(router.module) else router for router in routers
        ]
        known = [_within(router.path) for router in routers]
        for _, name, _ in chunk.where(_are_experts):
            path = name.rpartition(".")[0]
            inside = _within(path)
            if any(inside.startswith(other) or other.startswith(inside) for other in known):
                continue
            block = chunk.model.get_submodule(path)
            if _vendor_class(block) is None:
                raise RouterError(
                    "this block of experts has no router that is known, and others of the model have one",
                    where=path,
                    expected="each block's router, or none",
                    got=described(type(block)),
                    cause="a compiler or a patch that wrote some classes of transformers anew: switch it "
                    "off, or teach npu_replay its router (docs/routers.md)",
                )
        return routers

    def may_be_router(self, module: nn.Module, path: str) -> bool:
        """Return whether a module is named as a router, or is a block of experts without one."""
        if peft.original(module) is not None:
            return True
        kind = _vendor_class(module)
        if kind is None or _HASH_NAME.search(kind.__name__):
            return False  # a hash router looks the experts up by token id: every pass chooses alike
        if _ROUTER_NAME.search(kind.__name__):
            return True
        return _holds_experts(module) and not any(_is_router(inner) for inner in module.modules())

    def describe(self, module: nn.Module, path: str) -> Router | None:
        """Describe a router; refuse one that can't be replayed."""
        # Where PEFT trains a copy of a router or its block, the wrapper is the router: it runs one copy.
        if (original := peft.original(module)) is not None:
            parts = ((part, f"{path}.{name}".rstrip(".")) for name, part in original.named_modules())
            asked = (part for part in parts if self.may_be_router(*part))
            for router in filter(None, (self.describe(*part) for part in asked)):
                if router.module is original:
                    return replace(router, module=module)
                if _holds_experts(original) and not hasattr(original, "gradient_checkpointing"):
                    return replace(router, module=module, shows=None)
            return None
        kind = _vendor_class(module)
        if kind is None:
            return None
        if not _ROUTER_NAME.search(kind.__name__):
            return _block(module, kind, path)
        topk = _topk(module)
        experts = _experts(module)
        if not _calls_topk(kind):
            RouterError.unless(  # without a number of experts it is another kind of gate
                experts is None,
                f"{kind.__name__} can't be replayed: it doesn't choose its experts by a top-k",
                "torch.topk in the router",
                f"none in the code of {kind.__module__}.{kind.__name__}",
                "a model family with an argmax or a sampler (docs/models.md lists those that work)",
                path,
            )
            return None
        if topk is None or experts is None:
            raise RouterError(
                f"{kind.__name__} can't be replayed",
                where=path,
                expected="a router with a top-k and a number of experts of its own",
                got=f"top-k {topk}, experts {experts}",
                cause="a model family that npu_replay doesn't know yet (docs/models.md lists those it does)",
            )
        shows = functools.partial(_shows, name=kind.__name__, experts=experts, topk=topk)
        sorts = kind.__name__.endswith(_SORTS)
        return _router(module, kind, path, topk, experts, None if sorts else shows)


def _router(
    module: nn.Module,
    kind: type,
    path: str,
    topk: int,
    experts: int,
    shows: Callable[[object], torch.Tensor] | None,
) -> Router:
    layer = _DECODER_LAYER.search(path)
    groups = _own(module, *_GROUPS) or 0
    return Router(
        module=module,
        num_experts=experts,
        topk=topk,
        shows=shows,
        layer=int(layer.group(1)) if layer else None,
        masks=groups > 1,
        leaves=(_own(module, "topk_group") or 0) * (experts // groups) if groups > 1 else 0,
        row_order="batch",
        bypass=f"{kind.__name__} doesn't choose by a top-{topk} of scores [rows, {experts}], which alone "
        "can be replayed (docs/models.md); or a fused kernel or a captured graph took its place",
    )


def _placed(chunk: ModuleTree, configs: Mapping[str, Any], router: Router) -> Router:
    """Add the model's depth, and the layer number of a pipeline stage."""
    depth = _depth(configs, router.path)
    return replace(router, depth=depth, layer=_numbered(chunk, router, depth))


def _depth(configs: Mapping[str, Any], path: str) -> int:
    """Return the number of layers in the innermost config around a router; 0 if none says it.

    A tower of images or audio has a config beside it, and may be deeper than the decoder.
    """
    while True:
        depth = _own(configs.get(path), *_DEPTH)
        if depth or not path:
            return depth or 0
        path = path.rpartition(".")[0]


def _numbered(chunk: ModuleTree, router: Router, depth: int) -> int | None:
    """Return a router's decoder layer: its place, or in a pipeline stage the number that the layer has.

    A stage may put its layers into a new list, which counts them from 0 again, and its attention still knows
    its `layer_idx`. A list of all layers counts rightly, whatever number a pruned model's layers have.
    """
    at = _DECODER_LAYER.search(router.path)
    if at is None:
        return router.layer
    path = router.path[: at.end()].removesuffix(".")
    if len(chunk.model.get_submodule(path.rpartition(".")[0])._modules) >= depth:
        return router.layer
    inside = [layer for _, name, layer in chunk.where(_has_number) if _within(name).startswith(_within(path))]
    numbers = sorted({number for module in inside if (number := _own(module, "layer_idx")) is not None})
    if not numbers or router.layer in numbers:
        return router.layer
    if len(numbers) != 1:
        raise RouterError(
            "a layer's modules disagree about its number",
            where=path,
            expected=f"one layer_idx, or {router.layer}",
            got=numbers,
            cause="layers that were put together by hand, or a list that counts the layers anew",
        )
    return numbers[0]


def _block(module: nn.Module, kind: type, path: str) -> Router:
    """Describe a block of experts without a router module: the block itself is the router."""
    inside = getattr(module, "experts", None)
    config = getattr(module, "config", None)
    topk = _topk(module) or _own(config, "moe_topk")
    experts = _experts(module) or _experts(inside) or _own(config, *_EXPERTS)
    # The forward of another library may call the top-k in a function of its own.
    patched = not getattr(inspect.unwrap(module.forward), "__module__", "").startswith(_PACKAGES)
    usable = isinstance(inside, nn.Module) and (_calls_topk(kind) or patched)
    if usable and topk is not None and experts is not None:
        return _router(module, kind, path, topk, experts, shows=None)
    raise RouterError(
        f"{kind.__name__} can't be replayed: it chooses its experts inside the block, and not by one top-k "
        "of their scores",
        where=path,
        expected="a router module in the block; or torch.topk in its code, experts in a module of that "
        "name, and both numbers",
        got=f"{kind.__module__}.{kind.__name__}: top-k {topk}, experts {experts}",
        cause="one of the few families that choose otherwise (docs/models.md); in transformers 4 some that "
        "have a router module in 5: upgrade",
    )


def _shows(output: object, *, name: str, experts: int, topk: int) -> torch.Tensor:
    """Return the experts in a router's output: their ids [rows, topk], or bool [rows, experts].

    They are the one integer tensor [rows, topk] in it. Where there is none (Llama 4), a tensor of scores
    [rows, experts] shows them, if no row has more than topk that aren't zero.
    """
    values = output if isinstance(output, tuple) else (output,)
    tensors = [
        value.flatten(0, -2) for value in values if isinstance(value, torch.Tensor) and value.dim() > 1
    ]
    for ids in tensors:
        if not ids.dtype.is_floating_point and ids.shape[1] == topk:
            return ids
    for scores in tensors:
        if scores.dtype.is_floating_point and scores.shape[1] == experts:
            shown = scores != 0
            if bool((shown.sum(dim=1) <= topk).all()):
                return shown
    raise NoEffect(
        f"{name} can't be replayed: its output doesn't show which experts it chose",
        expected=f"an integer tensor [rows, {topk}] in the output, or scores "
        f"[rows, {experts}] that are zero but for the chosen experts",
        got=", ".join(f"{value.dtype} {list(value.shape)}" for value in tensors) or described(type(output)),
        cause="transformers 4's version of this router (upgrade to 5), or a model family that npu_replay "
        "doesn't know yet (docs/models.md lists those it does)",
    )


def _has_config(module: nn.Module, path: str) -> bool:
    return hasattr(module, "config")


def _has_number(module: nn.Module, path: str) -> bool:
    return hasattr(module, "layer_idx")


def _are_experts(module: nn.Module, path: str) -> bool:
    return path.rpartition(".")[2] == "experts"


def _vendor_class(module: nn.Module) -> type | None:
    """Return the transformers class that a module is or derives from."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith(_PACKAGES):
            return kind
    return None


def _holds_experts(module: nn.Module) -> bool:
    """Return whether a module is the innermost block of routed experts: by a child's name, or two numbers."""
    if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
        return False  # models carry their config's numbers, also where every layer is dense
    if type(module).__name__.endswith("Experts"):
        return False
    inline = _own(module, *_TOPK) is not None and _own(module, *_EXPERTS) is not None
    return inline or isinstance(getattr(module, "experts", None), nn.Module)


def _is_router(module: nn.Module) -> bool:
    kind = _vendor_class(module)
    named = kind is not None and _ROUTER_NAME.search(kind.__name__)
    return bool(named) and (_experts(module) is not None or _calls_topk(kind))


@functools.cache
def _calls_topk(kind: type) -> bool:
    """Return whether a method of this class or its bases names a top-k, also behind decorators."""
    # This only decides whether to refuse at once or after the first forward: a false yes does no harm.
    return any(
        "topk" in name
        for base in kind.__mro__
        if base.__module__.startswith(_PACKAGES)
        for value in vars(base).values()
        if inspect.isfunction(value)
        for name in inspect.unwrap(value).__code__.co_names
    )


def _topk(module: nn.Module | None) -> int | None:
    own = _own(module, *_TOPK)
    return own if own is not None else _own(getattr(module, "config", None), "top_k_experts")


def _experts(module: nn.Module | None) -> int | None:
    """Return the number of columns of the scores; the larger number, where a router has two."""
    own = [number for name in _EXPERTS if (number := _own(module, name)) is not None]
    if own:
        return max(own)
    if _own(module, *_TOPK) is None and _topk(module) is not None:
        return _own(getattr(module, "config", None), *_EXPERTS)  # both numbers are the config's (Gemma 4)
    return None


def _within(path: str) -> str:
    """Return what the paths of all modules inside begin with; the path of the model itself is empty."""
    return f".{path}." if path else "."


def _own(owner: Any, *names: str) -> int | None:
    """Return the first of these attributes that is a number."""
    values = (getattr(owner, name, None) for name in names)
    return next(
        (number for number in values if isinstance(number, int) and not isinstance(number, bool)), None
    )
