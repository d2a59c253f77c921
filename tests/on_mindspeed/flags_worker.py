"""What becomes of routing replay's flags on a config, in each way that MindSpeed and people treat it.

Its task holds "order", the imports in turn. The answer says for each way what the flag is, or the error.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from on_mindspeed.processes import triton_at_import

FLAG = "enable_routing_replay"
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def main(task: dict[str, Any]) -> dict[str, Any]:
    with triton_at_import():
        for module in task["order"]:
            importlib.import_module(module)
    return {name: ways(name) for name in ("TransformerConfig", "MLATransformerConfig")} | {
        "undone": undone(),
    }


def ways(name: str) -> dict[str, Any]:
    from megatron.core.transformer import transformer_config
    from mindspeed.megatron_adaptor import repatch

    cls = getattr(transformer_config, name)
    config = cls(**SMALL, **{FLAG: True})
    fields = dataclasses.fields(cls)
    found = {
        "not given": tried(lambda: cls(**SMALL)),
        "given": tried(lambda: config),
        "the other name": getattr(config, "moe_enable_routing_replay", None),
        "copy": tried(lambda: copy.copy(config)),
        "deepcopy": tried(lambda: copy.deepcopy(config)),
        "asdict": dataclasses.asdict(config).get(FLAG),
        "replace": tried(lambda: dataclasses.replace(config, num_layers=3)),
        "replace did": tried(lambda: dataclasses.replace(config, num_layers=3), "num_layers"),
        "its own class": tried(lambda: type(config)(**SMALL, **{FLAG: True})),
        "its fields": tried(lambda: cls(**{field.name: getattr(config, field.name) for field in fields})),
        "signature": sorted(inspect.signature(cls).parameters) == sorted(f.name for f in fields if f.init),
        "on the class": FLAG in vars(cls),
        "subclass": subclass(cls, FLAG),
        "subclass, nothing given": subclass(cls, None),
    }
    repatch({})
    found["repatch"] = tried(lambda: cls(**SMALL, **{FLAG: True}))
    repatch({"moe_router_topk": 4})
    found["repatch with arguments"] = tried(lambda: cls(**SMALL, **{FLAG: True}))
    found["the arguments too"] = tried(lambda: cls(**SMALL), "moe_router_topk")
    return found


def subclass(cls: type, flag: str | None) -> Any:
    @dataclasses.dataclass
    class Provider(cls):  # type: ignore[misc, valid-type]
        enable_routing_replay: bool = False

    return tried(lambda: Provider(**SMALL, **({flag: True} if flag else {})))


def undone() -> dict[str, Any]:
    """After uninstall() MindSpeed has what lay there before, and keeps it through a repatch."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from mindspeed.megatron_adaptor import repatch

    import npu_replay

    npu_replay.uninstall()
    found = {"uninstalled": hasattr(TransformerConfig(**SMALL), FLAG)}
    repatch({})
    return found | {"and repatched": hasattr(TransformerConfig(**SMALL), FLAG)}


def tried(make: Callable[[], Any], name: str = FLAG) -> Any:
    try:
        return getattr(make(), name, "absent")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
