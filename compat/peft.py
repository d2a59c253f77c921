"""Tells which PEFT adapters a model runs with, so that a reference pass isn't taken for the policy's.

TRL asks the policy's own module for the reference's log-probs, with its adapter switched off or another one
on. Only the layers with an adapter show every way of switching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from npu_replay.errors import RouterError


def adapters(model: nn.Module) -> Callable[[], object]:
    """Return a function that returns the state of a model's adapters; equal states run the same adapters."""
    for path, module in model.named_modules():
        configs = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
                raise RouterError(
                    "this kind of adapter doesn't tell whether it is switched on",
                    where=path or "the model",
                    expected="LoRA, or another kind that lies in the layers",
                    got=f"{type(config).__name__} of adapter {name!r}",
                    cause="prompt tuning, which also feeds more tokens than it is called with",
                )
    layers: list[Any] = [
        module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)
    ]

    def state() -> object:
        names = tuple(getattr(model, "peft_config", None) or ())  # one may be added later
        return names, [
            (layer.disable_adapters, list(layer.active_adapters), _of_samples(layer)) for layer in layers
        ]

    return state


def original(module: nn.Module) -> nn.Module | None:
    """Return the module that `modules_to_save` wraps here; its call runs this or an adapter's copy."""
    wraps = {"original_module", "modules_to_save"} <= module._modules.keys()
    return module._modules["original_module"] if wraps else None


def _of_samples(layer: nn.Module) -> list[object]:
    """Return the adapter of each sample, which a PeftModel's hooks carry where it was called with them."""
    keywords = [getattr(hook, "keywords", {}) for hook in layer._forward_pre_hooks.values()]
    return [names["adapter_names"] for names in keywords if "adapter_names" in names]
