"""Real rollouts in every engine's own form, read again: the same routes, and the model takes them."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import npu_replay
import sglang_outputs
import vllm_outputs
from choice import examples
from npu_replay import Rollout, RoutedExperts, TokenLayout, Turn, fingerprint, routers
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from npu_replay.routes.checks import Array

transformers.logging.set_verbosity_error()

# fmt: off
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 300, "num_experts_per_tok": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
# fmt: on
# fmt: off
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 4, "num_experts": 16},
    "qwen3_moe of 300 experts": {"num_hidden_layers": 3, "num_experts": 300, "mlp_only_layers": [1]},
    "deepseek_v3": {"num_hidden_layers": 5, "first_k_dense_replace": 2, "n_routed_experts": 16, "n_group": 4,
        "topk_group": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8},
}
# fmt: on
VLLM = ("0.14.0", "0.16.0", "0.20.2", "0.21.0", "0.22.0", "0.30.0", "0.33.0")


@functools.cache
def built(family: str) -> tuple[PreTrainedModel, RoutedModel]:
    """A real model with random weights, and what its config says of it."""
    config = AutoConfig.for_model(family.split()[0], **(SIZES | FAMILIES[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for router in routers.find([model])[0]:
            for weight in router.module.parameters():
                weight.normal_()
    return model, RoutedModel.from_config(model)


@dataclass(frozen=True, eq=False)
class Said:
    """What a model really said and chose: prompt and output, and the routes of all tokens but the last."""

    family: str
    prompt: list[int]
    output: list[int]
    routes: RoutedExperts

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def ids(self) -> Array:
        """[tokens, MoE layers, topk], the last row zeros: it never ran."""
        rows = self.routes.ids.numpy().astype(np.int64)
        return np.concatenate([rows, np.zeros_like(rows[:1])])

    def part(self, prompt: int, end: int) -> Said:
        """The first `end` tokens, of which `prompt` are the prompt: what comes later changes no route."""
        tokens = self.tokens[:end]
        return Said(self.family, tokens[:prompt], tokens[prompt:], self.routes.take(range(end - 1)))

    def fits(self, routes: RoutedExperts, start: int = 0) -> bool:
        """Are these the routes, from `start` on, and nothing for the last token?"""
        known = [start <= row < len(self.tokens) - 1 for row in range(len(self.tokens))]
        return (
            routes.layers == self.routes.layers
            and routes.num_experts == self.routes.num_experts
            and routes.ids.dtype == self.routes.ids.dtype
            and routes.fingerprint == fingerprint(self.tokens)
            and routes.recorded.tolist() == known
            and torch.equal(routes.ids[start:-1], self.routes.ids[start:])
        )


@functools.cache
def said(family: str, seed: int) -> Said:
    """Sample from a model, and record which experts it chose for every token that it ran."""
    model, _ = built(family)
    torch.manual_seed(seed)
    prompt = torch.randint(3, 300, (1, 30))
    whole = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=90,
        do_sample=True,
        suppress_tokens=[0, 1, 2],
    )
    assert whole.shape == (1, 120)
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(input_ids=whole[:, :-1], use_cache=False)
    return Said(family, whole[0, :30].tolist(), whole[0, 30:].tolist(), recording.routes[0])


# A layout: the form in which one release of an engine hands the rollout over, and its reader


@dataclass(frozen=True)
class Layout:
    name: str
    read: Callable[[Said, int], RoutedExperts]
    starts: bool = False
    """Can rows before a start be left out?"""


def vllm(version: str, form: str) -> Layout:
    def read(one: Said, start: int) -> RoutedExperts:
        _, model = built(one.family)
        sampled = vllm_outputs.Sampled(one.prompt, one.output, one.ids)
        if form == "object":
            answer: Any = vllm_outputs.request_output(version, model, sampled, start=start)
        else:
            endpoint: Any = form.split()[0]
            answer = vllm_outputs.answer(version, model, sampled, endpoint=endpoint, start=start)
            answer = json.dumps(answer) if form.endswith("text") else answer
        return from_vllm(answer, model, prompt_token_ids=one.prompt, start=start, version=version)[0]

    return Layout(f"vLLM {version}, {form}", read, starts=release(version) >= release("0.22.0"))


def sglang(version: str, form: str) -> Layout:
    def read(one: Said, start: int) -> RoutedExperts:
        _, model = built(one.family)
        rows = np.zeros((len(one.tokens) - 1, model.num_layers, model.topk), np.int32)
        rows[:, list(model.layers)] = one.ids[:-1]
        request = sglang_outputs.Request(
            version=version, prompt=one.prompt, output=one.output, rows=rows, asked_from=start
        )
        answer: Any = {
            "meta_info": request.meta_info,
            "generate": request.generate,
            "no tokenizer": lambda: request.generate(skip_tokenizer_init=True),
            "openai": request.openai,
        }[form]()
        if form == "generate":
            answer = json.dumps(answer)
        return from_sglang(
            answer,
            model,
            prompt_token_ids=one.prompt,
            output_ids=one.output,
            start_len=start,
            version=version,
        )

    return Layout(f"SGLang {version}, {form}", read, starts=True)


LAYOUTS = (
    [vllm(version, "object") for version in VLLM]
    + [vllm(version, form) for version in VLLM[3:] for form in ("completions", "chat text", "generate")]
    + [
        sglang(version, form)
        for version in ("0.5.7", "0.5.9", "0.5.11", "0.5.12", "0.5.23")
        for form in ("meta_info", "generate", "no tokenizer", "openai")
        if form != "openai" or release(version) >= release("0.5.9")
    ]
)


CASES = {layout.name: layout for layout in LAYOUTS}


@st.composite
def parts(draw: st.DrawFn) -> Said:
    """A rollout of one of the models, of any lengths."""
    one = said(draw(st.sampled_from(list(FAMILIES))), draw(st.integers(0, 2)))
    end = draw(st.sampled_from([2, 3, 17, 65, 66, 120]) | st.integers(2, 120))
    return one.part(draw(st.integers(1, end - 1)), end)


def replayed(parts: list[Said], routes: list[RoutedExperts]) -> RoutedExperts:
    """What the routers' own outputs show when the model is given these routes, in one padded batch.

    Its routers' weights are others by then, so that only the routes can have done it.
    """
    model, _ = built(parts[0].family)
    lengths = [len(one.tokens) for one in parts]
    ids, mask = (torch.zeros(len(parts), max(lengths), dtype=torch.int64) for _ in range(2))
    for row, one in enumerate(parts):
        ids[row, : lengths[row]] = torch.tensor(one.tokens)
        mask[row, : lengths[row]] = 1
    layout = TokenLayout.padded(
        lengths, order="batch", fingerprints=[fingerprint(one.tokens) for one in parts]
    )
    laid = layout.gather(routes)
    with torch.no_grad(), other_routers(model):
        with npu_replay.observe(model) as free:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        with npu_replay.observe(model) as seen, npu_replay.replay(model, [laid], min_overlap=0):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert npu_replay.compare(laid, free.shown).router_mismatch > 0.5
    return seen.shown[0].take(layout.row_of(seen.shown[0]))


@contextlib.contextmanager
def other_routers(model: PreTrainedModel) -> Iterator[None]:
    weights = [weight for router in routers.find([model])[0] for weight in router.module.parameters()]
    before = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(9)
    for weight in weights:
        weight.copy_(torch.randn(weight.shape, generator=generator))
    try:
        yield
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


@pytest.mark.choice
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_a_real_rollout_in_each_form_gives_its_routes_again(name: str, family: str) -> None:
    one = said(family, 0)
    assert one.fits(CASES[name].read(one, 0))


@examples(60)
@given(one=parts(), layout=st.sampled_from(LAYOUTS), data=st.data())
def test_any_part_of_a_rollout_from_any_row_gives_its_routes_again(
    one: Said, layout: Layout, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(one.prompt) - 1)) if layout.starts else 0
    assert one.fits(layout.read(one, start), start)


@examples(12)
@given(family=st.sampled_from(list(FAMILIES)), data=st.data())
def test_the_model_takes_decoded_routes_without_a_mismatch(family: str, data: st.DataObject) -> None:
    batch = []
    for seed in range(3):
        end = data.draw(st.integers(12, 120))
        batch.append(said(family, seed).part(data.draw(st.integers(1, end - 1)), end))
    decoded = [data.draw(st.sampled_from(LAYOUTS)).read(one, 0) for one in batch]
    shown = replayed(batch, decoded)
    # Each token but a sequence's last was sent where the engine had sent it.
    truth = RoutedExperts.concat([one.routes.take([*range(len(one.routes)), -1]) for one in batch])
    apart = npu_replay.compare(truth, shown)
    assert apart.token_layers == int(truth.recorded.sum()) * len(truth.layers)
    assert apart.router_mismatch == 0.0


@examples(40)
@given(family=st.sampled_from(list(FAMILIES)), seed=st.integers(0, 2), data=st.data())
def test_turns_in_different_forms_grow_into_the_routes_of_the_whole_t13_t30(
    family: str, seed: int, data: st.DataObject
) -> None:
    """Turns of one sample, with a tool's tokens in between; some engines leave the known rows out."""
    whole = said(family, seed)
    ends = sorted(data.draw(st.sets(st.integers(3, 120), min_size=1, max_size=4)))
    rollout = Rollout(built(family)[1])
    for end in ends:
        sampled = data.draw(st.integers(1, end - len(rollout))) if end > len(rollout) else 1
        prompt = max(1, end - sampled)
        one = whole.part(prompt, end)
        layout = data.draw(st.sampled_from(LAYOUTS))
        known = max(0, min(len(rollout) - 1, prompt - 1))
        rollout.append(whole.tokens[len(rollout) : prompt])
        routes = layout.read(one, known if layout.starts and data.draw(st.booleans()) else 0)
        rollout.extend(Turn(prompt=one.prompt, sampled=one.output, routes=routes))
    assert rollout.tokens.tolist() == whole.tokens[: ends[-1]]
    assert whole.part(1, ends[-1]).fits(rollout.routes)
