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


def toggled(turn: Callable[[Any], None], back: Callable[[Any], None]) -> Switch:
    @contextlib.contextmanager
    def switch(of: Any) -> Iterator[None]:
        turn(of)
        yield
        back(of)

    return switch


def last_layer(of: Any) -> Any:
    return [part for part in of.modules() if isinstance(part, peft.tuners.lora.LoraLayer)][-1]


@contextlib.contextmanager
def one_more(of: Any) -> Iterator[None]:
    of.add_adapter("late", LORA)
    of.set_adapter("late")
    yield
    of.delete_adapter("late")
    of.set_adapter("default")


def off(of: Any) -> AbstractContextManager[Any]:
    return of.disable_adapter()  # type: ignore[no-any-return]


WAYS: dict[str, tuple[Callable[[], Any], Switch]] = {
    "adapter off": (policy, off),
    "another adapter on": (
        two_adapters,
        toggled(lambda of: of.set_adapter("ref"), lambda of: of.set_adapter("default")),
    ),
    "off in one layer": (
        policy,
        toggled(
            lambda of: last_layer(of).enable_adapters(False), lambda of: last_layer(of).enable_adapters(True)
        ),
    ),
    "an adapter that came later": (policy, one_more),
    "LoRA on the experts": (lambda: policy(lora(target_parameters=["mlp.experts.down_proj"])), off),
    "the router trained whole": (
        lambda: policy(lora(target_modules=["q_proj"], modules_to_save=["gate"])),
        off,
    ),
    "LoRA on the router": (lambda: policy(lora(target_parameters=["mlp.gate.weight"])), off),
}


def fed() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 500, (3, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chosen(of: Any, call: dict[str, Any], grad: bool = False) -> list[list[int]]:
    """What the experts are handed in one call."""
    with torch.set_grad_enabled(grad), sent(of) as rows:
        of(**call)
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_pass_by_the_same_module_leaves_no_trace(way: str) -> None:
    """Followed is the PeftModel, or the model in it."""
    made, switched = WAYS[way]
    whole = made()
    call = fed()
    inner = way != "adapter off"
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
        assert reference == free
    assert reference != recorded  # a record of it would be seen
    assert updates == recorded


@pytest.mark.parametrize("inner", [False, True])
def test_adapters_of_each_sample_are_another_variant(inner: bool) -> None:
    whole = policy().eval()
    call = fed()
    with npu_replay.follow(whole.get_base_model() if inner else whole, eval_mode=True) as following:
        recorded = chosen(whole, call)
        other = chosen(whole, call | {"adapter_names": ["__base__"] * 3})
        assert following.metrics()["recorded"] == 3
        assert chosen(whole, call, grad=True) == recorded
    assert other != recorded


def test_a_merged_adapter_is_the_same_policy() -> None:
    """As weights are sent to a rollout engine."""
    followed = policy()
    call = fed()
    with npu_replay.follow(followed) as following:
        followed.merge_adapter()
        recorded = chosen(followed, call)
        followed.unmerge_adapter()
        assert chosen(followed, call, grad=True) == recorded
        assert not following.left_alone


def test_an_adapter_that_does_not_tell_is_refused() -> None:
    tuned = policy(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(RouterError, match="doesn't tell whether it is switched on"):
        npu_replay.follow(tuned).open()


# A router that is trained whole: PEFT keeps the original and a copy for each adapter, and calls one of them


def trained_whole(*parts: str) -> Any:
    """A model with copies of these modules, none like its original."""
    made = policy(lora(target_modules=["q_proj"], modules_to_save=list(parts)))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "modules_to_save" in name:
                parameter += torch.randn_like(parameter) * parameter.std()
    return made


@contextlib.contextmanager
def sent(of: Any) -> Iterator[list[list[int]]]:
    """How many rows each expert gets in each call of a block: what the experts themselves are handed."""
    counts: list[list[int]] = []

    def fused(_: Any, args: Any, kwargs: Any) -> None:
        counts.append(args[1].flatten().bincount(minlength=8).tolist())

    blocks = [module for module in of.modules() if type(module).__name__ == "Qwen3MoeSparseMoeBlock"]
    handles = [block.experts.register_forward_pre_hook(fused, with_kwargs=True) for block in blocks]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def counted(routes: Any) -> list[list[int]]:
    """The same, of routes."""
    return [
        layer.flatten().long().bincount(minlength=8).tolist()
        for batch in routes
        for layer in batch.ids.unbind(1)
    ]


@pytest.mark.parametrize(("part", "reentrant"), [("gate", None), ("gate", True), ("mlp", False)])
def test_a_router_that_is_trained_whole_is_recorded_and_replayed(part: str, reentrant: bool | None) -> None:
    """Whichever of its copies a pass runs, also in the recompute."""
    made = trained_whole(part)
    call = fed()
    with torch.no_grad(), npu_replay.record(made) as recording, sent(made) as rows:
        made(**call)
        with made.disable_adapter():
            made(**call)
    own, original = recording.routes
    assert counted(recording.routes) == rows
    assert npu_replay.compare(own, original).router_mismatch > 0.1
    if reentrant is not None:
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        made.enable_input_require_grads()
    with npu_replay.replay(made, [original], live_mismatch=True) as session, sent(made) as rows:
        made(**call).logits.square().mean().backward()
    assert rows[:3] == counted([original])
    assert rows[3:] == ([] if reentrant is None else rows[2::-1])
    assert session.metrics()["live_mismatch"] > 0.1
    ends = "gate.modules_to_save.default.weight" if part == "gate" else "modules_to_save.default.gate.weight"
    gates = [weight.grad for name, weight in made.named_parameters() if name.endswith(ends)]
    assert [grad is not None and bool(grad.any()) for grad in gates] == [True] * 3
    with npu_replay.observe(made) as seen, sent(made) as rows:
        made(**call)
    assert counted(seen.shown) == rows


def test_a_whole_layer_that_is_copied_is_refused_by_name() -> None:
    """A checkpoint inside the wrapper would run a copy again past the wrapper's call."""
    with pytest.raises(RouterError, match=r"same decoder layer.*modules_to_save: name its router there"):
        npu_replay.record(trained_whole("layers.1")).__enter__()
