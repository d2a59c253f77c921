"""A reference pass by the policy's own module, with PEFT's adapter off or another one on, leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, RouterError

peft = pytest.importorskip("peft", reason="ci/trainers.sh runs these tests, with PEFT")

from live.families import make  # noqa: E402

Switch = Callable[[Any], AbstractContextManager[Any]]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, **options)


LORA = lora(target_modules=["q_proj", "v_proj"])


def base() -> Any:
    return make("Qwen3Moe", num_hidden_layers=3, num_experts=8, num_experts_per_tok=2).train()


def policy(config: Any = LORA) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base(), config).train()


def two_adapters() -> Any:
    made = policy()
    made.add_adapter("ref", LORA)
    made.set_adapter("default")
    return made


def of_transformers() -> Any:
    torch.manual_seed(1)
    made = base()
    made.add_adapter(LORA)
    return made.train()


@contextlib.contextmanager
def other_adapter(of: Any) -> Iterator[None]:
    of.set_adapter("ref")
    yield
    of.set_adapter("default")


@contextlib.contextmanager
def disabled_by_transformers(of: Any) -> Iterator[None]:
    of.disable_adapters()
    yield
    of.enable_adapters()


@contextlib.contextmanager
def one_layer_off(of: Any) -> Iterator[None]:
    layer = [one for one in of.modules() if isinstance(one, peft.tuners.lora.LoraLayer)][-1]
    layer.enable_adapters(False)
    yield
    layer.enable_adapters(True)


@contextlib.contextmanager
def one_more(of: Any) -> Iterator[None]:
    of.add_adapter("late", LORA)
    of.set_adapter("late")
    yield
    of.delete_adapter("late")
    of.set_adapter("default")


WAYS: dict[str, tuple[Callable[[], Any], Switch]] = {
    "adapter off": (policy, lambda of: of.disable_adapter()),
    "another adapter on": (two_adapters, other_adapter),
    "off by transformers' own switch": (of_transformers, disabled_by_transformers),
    "off in one layer": (policy, one_layer_off),
    "an adapter that came later": (policy, one_more),
    "LoRA on the experts": (
        lambda: policy(lora(target_parameters=["mlp.experts.down_proj"])),
        lambda of: of.disable_adapter(),
    ),
    "LoRA on the router": (
        lambda: policy(lora(target_parameters=["mlp.gate.weight"])),
        lambda of: of.disable_adapter(),
    ),
}


def fed() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 500, (3, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chosen(of: Any, call: dict[str, Any], grad: bool = False) -> torch.Tensor:
    """What the routers' own outputs show in one call, [layers, rows, topk], sorted."""
    found: list[torch.Tensor] = []

    def saw(gate: Any, args: Any, out: Any) -> None:
        found.append(next(one for one in out if one.dtype == torch.int64).detach().sort(1).values)

    gates = [one for one in of.modules() if type(one).__name__ == "Qwen3MoeTopKRouter"]
    handles = [gate.register_forward_hook(saw) for gate in gates]
    with torch.set_grad_enabled(grad):
        of(**call)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
@pytest.mark.parametrize("way", WAYS)
def test_a_reference_pass_by_the_same_module_leaves_no_trace(way: str, inner: bool) -> None:
    """Followed is the PeftModel, or the model in it."""
    made, switched = WAYS[way]
    whole, call = made(), fed()
    followed = whole.get_base_model() if inner and isinstance(whole, peft.PeftModel) else whole
    with switched(whole):
        free = chosen(whole, call)
    with npu_replay.follow(followed) as following:
        recorded = chosen(whole, call)
        with switched(whole):
            reference = chosen(whole, call)
            with pytest.raises(MicroBatchError, match=r"another variant of the model \(adapters\)"):
                whole(**call)
        assert following.left_alone["of another variant of the model (adapters)"] == 1
        updates = chosen(whole, call, grad=True)
    if way != "an adapter that came later":  # which is another one each time
        assert torch.equal(reference, free)
    assert not torch.equal(reference, recorded)  # a record of it would be seen
    assert torch.equal(updates, recorded)


@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
def test_adapters_of_each_sample_are_another_variant(inner: bool) -> None:
    whole, call = policy().eval(), fed()
    followed = whole.get_base_model() if inner else whole
    with npu_replay.follow(followed, eval_mode=True) as following:
        recorded = chosen(whole, call)
        other = chosen(whole, call | {"adapter_names": ["__base__"] * 3})
        assert following.metrics()["recorded"] == 3
        assert torch.equal(chosen(whole, call, grad=True), recorded)
    assert not torch.equal(other, recorded)


def test_a_merged_adapter_is_the_same_policy() -> None:
    """As weights are sent to a rollout engine."""
    followed, call = policy(), fed()
    with npu_replay.follow(followed) as following:
        followed.merge_adapter()
        recorded = chosen(followed, call)
        followed.unmerge_adapter()
        assert torch.equal(chosen(followed, call, grad=True), recorded)
        assert not following.left_alone


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=["prompt", "prefix"],
)
def test_an_adapter_that_does_not_tell_is_refused(config: Callable[[], Any]) -> None:
    with pytest.raises(RouterError, match="doesn't tell whether it is switched on"):
        npu_replay.follow(policy(config())).open()
