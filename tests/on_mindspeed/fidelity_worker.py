"""What MindSpeed does, found out: test_fidelity.py asks the stand-in and the real one.

Scenario "first": MindSpeed before Megatron. Scenario "late", on two ranks: Megatron first, and flags on the
command line that MindSpeed doesn't know. npu_replay is not imported: it must not have a hand in this.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from on_mindspeed.feature_cases import SEQ_MODULE
from on_mindspeed.processes import lent_at_import

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
FLAG = {"enable_routing_replay": True}
MOE = {"moe_grouped_gemm": True, "moe_permutation_async_comm": True, "num_experts": 8, "moe_router_topk": 2}
MOE |= {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2, "moe_expert_capacity_factor": None}
NO_REPLACE = "AttributeError: '{}' object has no attribute 'moe_zero_memory_num_layers'"
FEATURES: dict[str, dict[str, Any]] = {
    "moe_alltoall_overlap_comm": {"moe_token_dispatcher_type": "alltoall"},
    "moe_alltoall_overlap_comm seq": {"moe_token_dispatcher_type": "alltoall_seq"},
    "moe_allgather_overlap_comm": {"moe_token_dispatcher_type": "allgather"},
    "moe_alltoall_mc2": {"moe_token_dispatcher_type": "alltoall"},
    "moe_tp_extend_ep": {"moe_token_dispatcher_type": "alltoall_seq"},
    "moe_fb_overlap": {"moe_token_dispatcher_type": "alltoall"},
    "balanced_moe_experts": {"moe_token_dispatcher_type": "alltoall"},
    "fix_router": {"moe_token_dispatcher_type": "alltoall"},
}
ALL_OFF = {feature.split()[0]: False for feature in FEATURES}
ALL_OFF |= {"moe_grouped_gemm": False, "moe_permutation_async_comm": False, "moe_npu_fast_ops": False}


def outcome(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, or its error by name."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# MindSpeed first


def first() -> dict[str, Any]:
    from mindspeed import megatron_adaptor  # noqa: F401

    newer = restores_methods()
    return {
        "torch": torch_side_effects(),
        "manager": manager(),
        "config": config(),
        "subclass": subclass(),
        "arguments": arguments(),
        "wraps": wraps_of_others(newer),
        "features": features(),
        "signatures": signatures(),
    }


def restores_methods() -> bool:
    """Is this one of the newer branches, whose removal of a patch knows classes?"""
    with contextlib.suppress(ModuleNotFoundError):
        from mindspeed.branch import BRANCH

        return BRANCH.restores_methods
    from mindspeed import patch_utils

    return "isclass" in inspect.getsource(patch_utils)


def torch_side_effects() -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils

    def named(one: int, two: int = 2) -> int:
        return one + two

    grid = torch.arange(6).reshape(2, 3).t()
    grid.view(6)[0] = 100
    compiled = [torch.compile(named), torch.jit.script(named)]
    return {
        "HAVE_TE": moe_utils.HAVE_TE,
        "signatures": [str(inspect.signature(one)) for one in compiled],
        "names": [one.__name__ for one in compiled],
        "runs": [one(1) for one in (*compiled, torch.compile(dynamic=True)(named))],
        "a view aliases": bool(grid.flatten()[0] == 100 or grid[0, 0] == 100),
    }


def manager() -> dict[str, Any]:
    """MindSpeedPatchesManager on modules of our own."""
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    def original() -> str:
        return "o"

    def plain() -> str:
        return "r"

    def one_wrapper(fn: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"1({fn()})"

    def two_decorator(fn: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"2({fn()})"

    def third_party(fn: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"ours({fn()})"

    names = ("toy_owner", "toy_alias", "toy_mindspeed_alias", "toy_stock")
    owner, alias, inside, stock = (types.ModuleType(name) for name in names)
    sys.modules.update(zip(names, (owner, alias, inside, stock), strict=True))
    for module in (owner, alias, inside):
        module.work = original
    path = "toy_owner.work"
    found = {}

    Manager.register_patch(path, one_wrapper)
    patch = Manager.patches_info[path]
    applied = [patch.is_applied]
    found["registered"] = owner.work()
    Manager.apply_patches()
    applied.append(patch.is_applied)
    found["everywhere"] = [module.work() for module in (owner, alias, inside)]
    for _ in range(2):
        Manager.register_patch(path, two_decorator)
    found["is_applied"] = [*applied, patch.is_applied]
    Manager.apply_patches()
    found["stacked"] = owner.work()
    Manager.register_patch(path, plain)
    Manager.apply_patches()
    found["replaced"] = owner.work()
    found["replaced twice"] = outcome(lambda: Manager.register_patch(path, original))

    # somebody wraps over it, and an alias keeps what MindSpeed set
    owner.work = third_party(owner.work)
    patch.remove_patch()
    patch.remove_wrappers()
    found["removed"] = [module.work() for module in (owner, alias, inside)]
    found["forgotten"] = [len(patch.wrappers), patch.patch_func is None, path in Manager.patches_info]
    Manager.register_patch(path, one_wrapper)
    Manager.apply_patches()
    found["applied again"] = [owner.work(), patch.orig_func is original]

    # one alias of three is wrapped first: the others are passed by
    owner.other = alias.other = stock.other = original
    alias.other = third_party(original)
    Manager.register_patch("toy_alias.other", one_wrapper)
    Manager.apply_patches()
    found["a wrapped alias"] = [module.other() for module in (alias, owner, stock)]
    for name in (path, "toy_alias.other"):
        del Manager.patches_info[name]
    return found


def config() -> dict[str, Any]:
    """What becomes of an unknown argument, and of a config that carries it."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from mindspeed.megatron_adaptor import repatch

    one = TransformerConfig(**SMALL, **FLAG)
    own = {field.name for field in dataclasses.fields(TransformerConfig)}
    extra = [field for field in dataclasses.fields(one) if field.name not in own]
    rebuilt = TransformerConfig(**{name: getattr(one, name) for name in own})
    found: dict[str, Any] = {
        "an unknown argument": one.enable_routing_replay,
        "of MLA": MLATransformerConfig(**SMALL, **FLAG).enable_routing_replay,
        "isn't given": hasattr(TransformerConfig(**SMALL), "enable_routing_replay"),
        "its class": f"{type(one).__module__}.{type(one).__qualname__}",
        "is one": isinstance(one, TransformerConfig),
        "classes": len({TransformerConfig, type(one), type(TransformerConfig(**SMALL))}),
        "more fields, in init, with defaults": [
            len(extra) > 0,
            any(field.init for field in extra),
            any({field.default, field.default_factory} != {dataclasses.MISSING} for field in extra),
        ],
        "copy": copy.copy(one).enable_routing_replay,
        "deepcopy": copy.deepcopy(one).enable_routing_replay,
        "asdict": set(dataclasses.asdict(one)) >= {field.name for field in extra},
        "replace": outcome(lambda: dataclasses.replace(one, num_layers=3).num_layers),
        "type": outcome(lambda: type(one)(**SMALL).num_layers),
        "type with the flag": outcome(lambda: type(one)(**SMALL, **FLAG).num_layers),
        "made of its fields": hasattr(rebuilt, "enable_routing_replay"),
        "pickle": outcome(lambda: len(pickle.dumps(one))),
    }
    TransformerConfig.enable_routing_replay = False
    dropped = [TransformerConfig(**SMALL, **FLAG).enable_routing_replay]
    repatch(FLAG)
    found["on the class"] = [*dropped, TransformerConfig(**SMALL).enable_routing_replay]
    del TransformerConfig.enable_routing_replay
    kinds = (TransformerConfig, MLATransformerConfig)
    found["repatched"] = [kind(**SMALL).enable_routing_replay for kind in kinds]
    repatch({"enable_routing_replay": False, "moe_router_topk": 4})
    filled = TransformerConfig(**SMALL), TransformerConfig(**SMALL, moe_router_topk=3)
    found["filled"] = [one.moe_router_topk for one in filled]
    repatch({"moe_router_topk": 2})
    over_adaptor = "megatron_adaptor" in sys.modules  # its wrapper lies beneath, and knows the written flag
    written = signature_written(TransformerConfig)
    found["in the signature"] = None if over_adaptor else written
    found["in the signature, over MegatronAdaptor"] = written if over_adaptor else None
    repatch({})
    found["after a repatch"] = TransformerConfig(**SMALL, **FLAG).enable_routing_replay
    return found


def signature_written(cls: Any) -> Any:
    """The flag is added to the signature of __init__, as verl does."""
    init = cls.__init__
    signature = inspect.signature(init)
    flag = inspect.Parameter("enable_routing_replay", inspect.Parameter.KEYWORD_ONLY, default=False)
    init.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])
    return outcome(lambda: cls(**SMALL, **FLAG).enable_routing_replay)


def subclass() -> dict[str, Any]:
    """A user's own dataclass over TransformerConfig, defined after MindSpeed."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        enable_routing_replay: bool = False

    Provider.__qualname__ = "Provider"
    globals()["Provider"] = Provider

    def made() -> Any:
        return Provider(**SMALL, **FLAG)

    asked = (
        lambda: made().enable_routing_replay,
        lambda: type(made()) is Provider,
        lambda: dataclasses.replace(made(), num_layers=3).enable_routing_replay,
        lambda: pickle.loads(pickle.dumps(made())).enable_routing_replay,
    )
    lives = f"{TransformerConfig.__module__}.TransformerConfig.__init_subclass__" in Manager.patches_info
    answers = {outcome(ask) for ask in asked}
    return {
        "as its branch has it": answers == {True if lives else NO_REPLACE.format("Provider")},
        "unknown": outcome(lambda: Provider(**SMALL, no_such_flag=1).no_such_flag),
    }


def arguments() -> dict[str, Any]:
    """Where arguments come from, and the checks that a config goes through."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import global_vars
    from mindspeed.args_utils import get_full_args, get_mindspeed_args
    from mindspeed.megatron_adaptor import repatch

    repatch({"toy": 1})
    own = get_mindspeed_args()

    def checked() -> TransformerConfig:
        return TransformerConfig(**SMALL, moe_fb_overlap=True)

    found: dict[str, Any] = {
        "its own": [get_full_args() is own, own.toy, own.optimization_level],
        "defaults": hasattr(get_mindspeed_args(get_defaults=True), "toy"),
        "a config is checked": outcome(checked),
    }
    theirs = copy.copy(own)
    theirs.toy = 2
    global_vars.set_args(theirs)
    found["megatron.training's"] = [get_full_args() is theirs, TransformerConfig(**SMALL).toy]
    repatch({"toy": 3})
    found["repatched"] = [theirs.toy, own.toy]
    global_vars.set_args(None)
    return found


def wraps_of_others(newer: bool) -> dict[str, Any]:
    """Wraps that came after MindSpeed, through a removal and a repatch."""
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import router
    from mindspeed.megatron_adaptor import repatch
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    places = [
        (transformer_config.TransformerConfig, "__init__"),
        (transformer_config.TransformerConfig, "__post_init__"),
        (transformer_config.MLATransformerConfig, "__init__"),
        (router.TopKRouter, "__init__"),
        (router.TopKRouter, "routing"),
        (router.TopKRouter, "forward"),
    ]
    found = {}
    before = [vars(cls)[name] for cls, name in places]
    for cls, name in places:
        setattr(cls, name, wrapped(vars(cls)[name]))
    ours = [vars(cls)[name] for cls, name in places]
    Manager.remove_patches()
    for when, then in (("removed", lambda: None), ("repatched", lambda: repatch({}))):
        then()
        still = zip(places, ours, strict=True)
        found[f"lost when {when}"] = [
            f"{cls.__name__}.{name}" for (cls, name), one in still if vars(cls)[name] is not one
        ]
    for (cls, name), one in list(zip(places, before, strict=True))[3:]:
        setattr(cls, name, one)
    # Without a wrap over it removal puts a method back on newer branches.
    Manager.remove_patches()
    patch = Manager.patches_info[f"{transformer_config.__name__}.TransformerConfig.__init__"]
    restored = transformer_config.TransformerConfig.__init__ is patch.orig_func
    found["a method is put back as its branch does"] = restored == newer
    repatch({})
    # Once a feature has been on, its place is registered for good.
    found["once registered"] = None
    if not lacks_layers():
        turn_on("moe_tp_extend_ep")
        turn_off()
        stock = router.TopKRouter.routing
        router.TopKRouter.routing = wrapped(stock)
        repatch({})
        found["once registered"] = router.TopKRouter.routing is stock
    return found


def lacks_layers() -> bool:
    """Can't MindSpeed's own MoE layers be imported, since they want a module of an older Megatron?"""
    try:
        importlib.import_module("mindspeed.core.transformer.moe.moe_feature")
    except ModuleNotFoundError as error:
        if error.name != SEQ_MODULE:
            raise
        return True
    return False


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    def ours(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return ours


def features() -> dict[str, Any]:
    """What each feature replaces; None where this branch hasn't it. In the end: is anything left?"""
    from mindspeed.args_utils import get_mindspeed_args

    turn_off()
    stock = in_place()
    known = vars(get_mindspeed_args(get_defaults=True))
    found: dict[str, Any] = {}
    for feature in FEATURES:
        missing = feature.split()[0] not in known or (feature != "fix_router" and lacks_layers())
        found[feature] = None if missing else outcome(lambda feature=feature: replaced_by(feature, stock))
    turn_off()
    found["left"] = sorted(name for name, one in in_place().items() if one is not stock[name])
    return found


def in_place() -> dict[str, Any]:
    """What stands now where features put something else."""
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_layer, moe_utils, router

    return {
        "layer": moe_layer.MoELayer,
        "routing": router.TopKRouter.routing,
        "block": transformer_block.TransformerBlock.__init__,
        "spec": moe_module_specs.get_moe_module_spec,
        "schedule": schedules.get_forward_backward_func,
        "topk": getattr(moe_utils, "topk_softmax_with_capacity", None),
        "topk since 0.14": getattr(moe_utils, "topk_routing_with_score_function", None),
        "router": router.TopKRouter,
        "router_init": router.TopKRouter.__init__,
        "router_forward": router.TopKRouter.forward,
    }


def replaced_by(feature: str, stock: dict[str, Any]) -> list[Any]:
    """The layer, whether it is a Megatron MoELayer, and what else is another."""
    turn_on(feature)
    now = in_place()
    is_stock = issubclass(now["layer"], stock["layer"])
    changed = {name.split()[0] for name, one in now.items() if one is not stock[name]} - {"layer"}
    return [now["layer"].__name__, is_stock, *sorted(changed)]


def turn_on(feature: str) -> None:
    """This feature, and no other."""
    from mindspeed.megatron_adaptor import repatch

    needed = {"moe_fb_overlap": True} if feature == "balanced_moe_experts" else {}
    repatch(ALL_OFF | MOE | needed | {feature.split()[0]: True} | FEATURES[feature])


def turn_off() -> None:
    """No feature, and none of the arguments that they needed."""
    from mindspeed.args_utils import get_mindspeed_args
    from mindspeed.megatron_adaptor import repatch

    repatch(ALL_OFF)
    for name in ("moe_token_dispatcher_type", *set(MOE) - set(ALL_OFF)):
        if hasattr(get_mindspeed_args(), name):
            delattr(get_mindspeed_args(), name)


def signatures() -> dict[str, Any]:
    """The names that npu_replay and its tests go by inside moe_fb_overlap; None where its import fails."""
    if lacks_layers():
        return dict.fromkeys(
            ("layer", "forward", "backward", "forward_moe", "block", "layer_inputs", "unpacked")
        )
    from mindspeed.core.transformer.moe.moe_feature.fb_overlap import transformer_block, transformer_layer
    from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import LayerGraph
    from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs import fwd

    def names(fn: Callable[..., Any]) -> list[str]:
        # Newer branches hand on input_ids, for hash layers; `_` is what Megatron 0.16 passes to the stand-in.
        return [name for name in inspect.signature(fn).parameters if name not in ("input_ids", "_")]

    graph = LayerGraph.__new__(LayerGraph)
    graph.record_layer_inputs(1, 2, 3)
    return {
        "layer": names(transformer_layer.transformer_layer_forward_backward_overlaping),
        "forward": names(transformer_layer.transformer_layer_forward),
        "backward": names(transformer_layer.transformer_layer_backward),
        "forward_moe": names(fwd.transformer_layer_forward_moe),
        "block": names(transformer_block.transformer_block_forward_backward_overlaping),
        "layer_inputs": list(graph.layer_inputs),
        "unpacked": inspect.getsource(transformer_layer).count("*bwd_layer_graph.layer_inputs")
        + inspect.getsource(transformer_layer).count("*layer_graph.layer_inputs"),
    }


# Megatron first, flags on the command line, two ranks


def late(task: dict[str, Any]) -> dict[str, Any]:
    have_te = importlib.util.find_spec("transformer_engine") is not None  # TransformerEngineNPU
    sys.argv = ["pretrain.py", "--a-flag", "--a-list", "1", "2", "--a-value=3"]
    with lent_at_import():
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.transformer_config import TransformerConfig

    calls: list[str] = []
    own_init = TransformerConfig.__init__

    def survivor(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append("survivor")
        own_init(self, *args, **kwargs)

    survivor.__wrapped__ = own_init  # type: ignore[attr-defined]
    TransformerConfig.__init__ = survivor
    without = outcome(lambda: TransformerConfig(**SMALL, no_such_flag=1).num_layers)
    calls.clear()
    with lent_at_import():
        from mindspeed import megatron_adaptor
    from mindspeed.args_utils import get_mindspeed_args

    found: dict[str, Any] = {
        "without MindSpeed": without,
        "HAVE_TE where it is there": have_te == moe_utils.HAVE_TE,
        "arguments": [getattr(get_mindspeed_args(), f"a_{name}") for name in ("flag", "list", "value")],
    }
    for _ in range(2):
        megatron_adaptor.repatch({})
    TransformerConfig(**SMALL)
    found["a wrap from before"] = calls
    store = f"file://{task['store']}"
    dist.init_process_group("gloo", init_method=store, rank=task["rank"], world_size=task["world"])
    sums = {}
    for kind in (torch.float64, torch.float32, torch.int64):
        one = torch.ones(1, dtype=kind)
        dist.all_reduce(one)
        sums[str(kind).split(".")[-1]] = one.item()
    dist.destroy_process_group()
    return found | {"all_reduce": sums}


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    if task["scenario"] == "first":
        with lent_at_import():
            return first()
    return late(task)
