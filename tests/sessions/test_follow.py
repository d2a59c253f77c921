"""follow: a loop without a seam, on a real model of transformers.

Truth are hooks of the test's own on every router, and places that the test knows since it made the call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import MicroBatchError, ReplayError, RoutedExperts, RouterError
from npu_replay.following.fed_sequences import fed_sequences

pytest.importorskip("transformers")

from live.families import make

pytestmark = pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning")
EXPERTS = 8
TOPK = 2
LAYERS = 3
Fed = tuple[dict[str, Any], list[torch.Tensor]]
"""What a model is called with, and of each sequence the rows of its tokens."""


def model(seed: int = 0, recompute: str | None = None, **changes: Any) -> Any:
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    made = make("Qwen3Moe", seed, **sizes | changes).train()
    if recompute:
        made.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        made.enable_input_require_grads()
    return made


@pytest.fixture
def followed() -> Any:
    return model()


def texts(count: int = 5, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 500, (3 + 2 * n,), generator=generator) for n in range(count)]


def padded(sequences: Sequence[torch.Tensor], left: int = 0, right: int = 0, positions: bool = False) -> Fed:
    """[batch, sequence]; the longest has this much padding, the others more, on the side that has any."""
    width = left + max(map(len, sequences)) + right
    ids = torch.randint(2, 500, (len(sequences), width))  # padding is anything
    mask = torch.zeros_like(ids)
    places = []
    for row, sequence in enumerate(sequences):
        first = left if right or not left else width - len(sequence)
        ids[row, first : first + len(sequence)] = sequence
        mask[row, first : first + len(sequence)] = 1
        places.append(row * width + first + torch.arange(len(sequence)))
    fed = {"input_ids": ids, "attention_mask": mask}
    if positions:  # as OpenRLHF has them
        fed["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return fed, places


def packed(sequences: Sequence[torch.Tensor], end: int = 0, bounds: bool = False) -> Fed:
    """[1, tokens]; told by position_ids, or by cumulative lengths; with padding at its end, at position 0 or
    behind the last length."""
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(end, dtype=torch.long)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    fed = {"input_ids": torch.cat([*sequences, torch.zeros(end, dtype=torch.long)])[None]}
    fed |= {"cu_seq_lens_q": starts} if bounds else {"position_ids": positions[None]}
    return fed, [a + torch.arange(n) for a, n in zip(starts, lengths, strict=False)]


def ulysses_padded(ids: torch.Tensor, positions: torch.Tensor, to: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What verl's `ulysses_pad` does for so many ranks; tests/on_verl holds it against that."""
    size = -ids.shape[1] % to
    return (
        torch.nn.functional.pad(ids, (0, size), value=0),
        torch.cat([positions, torch.arange(size)[None]], dim=1),
    )


def ending(sequences: Sequence[torch.Tensor], to: int) -> Fed:
    """Packed, and padded to a multiple of `to` by an end whose positions are 0, 1, 2."""
    fed, places = packed(sequences)
    ids, positions = ulysses_padded(fed["input_ids"], fed["position_ids"], to)
    return {"input_ids": ids, "position_ids": positions}, places


LAYOUTS: dict[str, Callable[[Sequence[torch.Tensor]], Fed]] = {
    "right": lambda texts: padded(texts, right=2),
    "left": lambda texts: padded(texts, left=3, positions=True),
    "both sides": lambda texts: padded(texts, left=1, right=2),
    "packed": packed,
    "packed, padded end": lambda texts: packed(texts, end=5),
    "packed to 2, padded end of its own positions": lambda texts: ending(texts, 2),
    "packed to 16, padded end of its own positions": lambda texts: ending(texts, 16),
    "cu_seqlens": lambda texts: packed(texts, bounds=True),
    "cu_seqlens, padded end": lambda texts: packed(texts, end=4, bounds=True),
    "one by one": lambda texts: ({"input_ids": texts[0][None]}, [torch.arange(len(texts[0]))]),
}


class Seen:
    """Of each call of every router, recomputes too: what it put out and what its scores say, sorted.

    Args:
        own: False where the routers' weights are sharded: then what they put out stands for both.
    """

    def __init__(self, of: Any, own: bool = True) -> None:
        self._own = own
        self.calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        gates = [module for path, module in of.named_modules() if path.endswith("mlp.gate")]
        assert len(gates) == LAYERS
        self._handles = [
            gate.register_forward_hook(lambda gate, args, out, layer=layer: self._saw(layer, gate, args, out))
            for layer, gate in enumerate(gates)
        ]

    def _saw(self, layer: int, gate: Any, args: Any, out: Any) -> None:
        ids = next(tensor for tensor in out if tensor.dtype == torch.int64).detach()
        own = (args[0].reshape(len(ids), -1) @ gate.weight.T).topk(TOPK).indices if self._own else ids
        self.calls.append((layer, ids.sort(1).values, own.sort(1).values))

    def of(self, places: Sequence[torch.Tensor], own: bool = False) -> list[list[torch.Tensor]]:
        """By sequence, what each call chose for it, [calls][tokens, topk]; and forget it."""
        calls = self.calls
        self.calls = []
        return [[(live if own else ids)[at] for _, ids, live in calls] for at in places]

    def layers(self) -> list[int]:
        return [layer for layer, *_ in self.calls]


def move(of: Any) -> None:
    """An optimizer's step that the routers notice."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for path, weight in of.named_parameters():
            if path.endswith("gate.weight"):
                weight.add_(torch.randn(weight.shape, generator=generator))


def record(
    followed: Any, fed: Fed, seen: Seen | None = None, without: Any = torch.no_grad
) -> list[list[torch.Tensor]]:
    with without():
        followed(**fed[0])
    return seen.of(fed[1]) if seen else []


def learn(followed: Any, fed: Fed) -> None:
    logits = followed(**fed[0]).logits.flatten(0, 1)
    logits[torch.cat(fed[1])].square().mean().backward()


def assert_replayed(seen: Seen, fed: Fed, wanted: Sequence[Sequence[torch.Tensor]]) -> None:
    """Each call of each router, recomputes too, took what the sequences' routers had recorded.

    Padding chooses by itself.
    """
    layers = seen.layers()
    calls = seen.calls
    assert len(layers) >= LAYERS
    padding = torch.ones(len(calls[0][1]), dtype=torch.bool).index_fill(0, torch.cat(fed[1]), False)
    assert all(torch.equal(ids[padding], own[padding]) for _, ids, own in calls)
    got = seen.of(fed[1])
    seen.calls = calls
    own = seen.of(fed[1], own=True)
    moved = []
    for sequence, recorded, live in zip(got, wanted, own, strict=True):
        for layer, ids, free in zip(layers, sequence, live, strict=True):
            assert torch.equal(ids, recorded[layer])
            moved.append(not torch.equal(free, recorded[layer]))
    assert any(moved)  # a run without it would have chosen otherwise


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", ["right", "both sides", "packed"])
def test_an_update_takes_what_was_recorded_in_whatever_layout(
    before: str, after: str, recompute: str | None
) -> None:
    """Other padding, other micro-batches, another order."""
    followed = model(recompute=recompute)
    sequences = texts()
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted: dict[int, list[torch.Tensor]] = {}
        for part in ([0, 1, 2], [3, 4]):
            without = torch.inference_mode if before == "packed" else torch.no_grad
            chosen = record(followed, LAYOUTS[before]([sequences[n] for n in part]), seen, without)
            wanted |= dict(zip(part, chosen, strict=True))
        move(followed)
        parts = [[4, 0], [3, 2, 1]] if after != "one by one" else [[n] for n in (3, 0, 4, 1, 2)]
        for part in parts:
            fed = LAYOUTS[after]([sequences[n] for n in part])
            learn(followed, fed)
            assert len(seen.calls) == LAYERS * (2 if recompute else 1)
            assert_replayed(seen, fed, [wanted[n] for n in part])
        assert following.metrics()["replayed"] == following.metrics()["recorded"] == 5


# A packed row's padded end has positions of its own, 0, 1, 2, as verl pads for Ulysses


def test_a_row_may_end_with_the_models_own_padding() -> None:
    """And each row of several."""
    followed = model()
    sequences = texts()
    followed.config.pad_token_id = 77
    first, second = (ending(part, 24)[0] for part in (sequences[:3], sequences[3:4]))
    for fed, length in ((first, 15), (second, 9)):
        fed["input_ids"][0, length:] = 77
    rows = {name: torch.cat([first[name], second[name]]) for name in first}
    places = [*packed(sequences[:3])[1], 24 + torch.arange(9)]
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, (rows, places), seen)
        move(followed)
        learn(followed, (rows, places))
        assert_replayed(seen, (rows, places), wanted)
        assert following.metrics()["held"] == 4


def last(ids: Sequence[int]) -> Callable[[], Fed]:
    """A packed row that ends with these tokens, as a sequence of their own."""
    return lambda: packed([*texts(), torch.tensor(ids)])


UNKNOWN: dict[str, Callable[[], Fed]] = {
    "of other tokens": last([8, 8, 8]),
    "of two padding ids": last([0, 0, 77]),
    "of padding that doesn't end the row": lambda: packed(
        [texts()[0], torch.zeros(4, dtype=torch.long), texts()[1]]
    ),
    "that is all of the row": lambda: packed([torch.zeros(4, dtype=torch.long)]),
    "that ends like padding": last([9, 0, 0, 0]),
    "that begins like padding": last([0, 0, 0, 9]),
    "that a mask says is there": lambda: padded([*texts()[:4], torch.zeros(4, dtype=torch.long)], left=1),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_sequence_that_nobody_recorded_is_refused_all_the_same(what: str) -> None:
    followed = model()
    followed.config.pad_token_id = 77
    with npu_replay.follow(followed) as following:
        record(followed, padded(texts()))
        with pytest.raises(MicroBatchError, match="no routes are known"):
            learn(followed, UNKNOWN[what]())
        record(followed, fed := UNKNOWN[what]())
        learn(followed, fed)  # recorded, it is one
        assert following.metrics()["replayed"] == len(fed[1])


def test_what_looks_like_padding_and_is_known_is_replayed() -> None:
    """Recorded where a mask said that it was there."""
    followed = model()
    sequences = [*texts()[1:3], torch.zeros(6, dtype=torch.long)]
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, padded(sequences), seen)
        move(followed)
        fed = packed(sequences)
        learn(followed, fed)
        assert_replayed(seen, fed, wanted)
        assert following.metrics()["held"] == 3


def test_keys_are_those_of_the_sequences_alone() -> None:
    fed, _ = ending(texts(), 8)
    alone = fed_sequences(packed(texts())[0], {}, [*"abcde"])
    ending_too = fed_sequences(fed, {}, [*"abcde"])
    assert ending_too.marks[:5] == alone.marks
    with pytest.raises(MicroBatchError, match="another number of sample keys"):
        fed_sequences(fed, {}, [*"abcd"])


# What an update does with what was recorded


@pytest.mark.parametrize("way", ["left as it is", "paused"])
def test_a_pass_between_updates_that_becomes_the_record_is_said_once(
    followed: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of sequences that no update has taken so far, and where a second such pass changes nothing."""
    fed = padded(texts())
    other = padded(texts(3, seed=1))
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        record(followed, other, seen)
        wanted = record(followed, fed, seen)
        move(followed)
        learn(followed, other)
        seen.calls.clear()
        for _ in range(2):
            with following.paused() if way == "paused" else contextlib.nullcontext():
                measured = record(followed, fed, seen)
        assert not all(map(torch.equal, measured[4], wanted[4]))
        for _ in range(2):
            move(followed)
            learn(followed, fed)
            assert_replayed(seen, fed, wanted if way == "paused" else measured)
            seen.calls.clear()
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == (way != "paused")
    assert all("between two updates" in warning and "5 sequences" in warning for warning in warnings)


def trace(following: Any) -> dict[str, float]:
    return {
        name: value for name, value in following.metrics().items() if name not in ("left_alone", "seconds")
    }


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "unknown tokens": (lambda: {"input_ids": torch.arange(50, 60)[None]}, "no routes are known"),
    "a hole in the mask": (
        lambda: {
            "input_ids": texts()[4][None],
            "attention_mask": torch.ones(1, 11).index_fill(1, torch.tensor(4), 0),
        },
        "has holes",
    ),
    "a mask of sequence numbers": (
        lambda: {"input_ids": texts()[4][None], "attention_mask": torch.arange(11)[None] // 4 + 1},
        "doesn't tell which places are padding",
    ),
    "a mask of four dimensions": (
        lambda: {"input_ids": texts()[4][None], "attention_mask": torch.ones(1, 1, 11, 11).bool()},
        "doesn't tell which places are padding",
    ),
    "embeddings": (lambda: {"inputs_embeds": torch.randn(1, 11, 64)}, "which this call lacks"),
    "an image that nobody recorded": (
        lambda: {"input_ids": texts()[4][None], "pixel_values": torch.randn(1, 3, 4, 4)},
        "no routes are known",
    ),
    "a later part (SP)": (
        lambda: {"input_ids": texts()[4][None, 5:], "position_ids": torch.arange(5, 11)[None]},
        "part of a sequence",
    ),
    "two chunks (zigzag CP)": (
        lambda: {
            "input_ids": texts()[4][None, [0, 1, 2, 8, 9, 10]],
            "position_ids": torch.tensor([[0, 1, 2, 8, 9, 10]]),
        },
        "part of a sequence",
    ),
    "all lengths (Ulysses)": (
        lambda: {"input_ids": texts()[4][None, :5], "cu_seq_lens_q": torch.tensor([0, 11])},
        "exceed the call's tokens",
    ),
    "a cache": (lambda: {"input_ids": texts()[4][None], "use_cache": True}, "with a cache"),
    "transformers 5.24's": (lambda: {"input_ids": texts()[4][None], "cache": object()}, "with a cache"),
    "one flat row": (lambda: {"input_ids": texts()[4]}, "which this call lacks"),
}


@pytest.mark.parametrize(
    ("what", "grad"),
    [
        *((what, True) for what in BAD),
        *((what, False) for what in ("a hole in the mask", "embeddings", "a later part (SP)")),
    ],
)
def test_a_call_that_cannot_be_followed_is_an_error(followed: Any, what: str, grad: bool) -> None:
    """And what an update couldn't find isn't recorded."""
    (call, message) = BAD[what]
    with npu_replay.follow(followed) as following:
        record(followed, padded(texts()))
        before = trace(following)
        with pytest.raises(MicroBatchError, match=message) as caught, torch.set_grad_enabled(grad):
            followed(**call())
        assert "micro-batch 1" in str(caught.value)
        assert trace(following) == before
        learn(followed, padded(texts()))  # and what follows is in order


@pytest.mark.parametrize("cache", [True, False])
def test_generation_leaves_no_trace(followed: Any, cache: bool) -> None:
    ids = texts()[4][None]
    free = followed.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=cache)
    with npu_replay.follow(followed) as following:
        record(followed, padded(texts()))
        before = trace(following)
        answer = followed.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=cache)
        assert trace(following) == before
        assert sum(following.left_alone.values()) == 4
    assert torch.equal(answer, free)


def test_a_rollouts_routes_in_eval_mode_are_never_left_alone_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Old log-probs of R3 in eval mode would choose by themselves, and the update wouldn't."""
    followed = model().eval()
    fed = padded(texts())
    _, ids = rollout(texts()[4])
    for eval_mode in (False, True):
        seen = Seen(followed)
        caplog.clear()
        with npu_replay.follow(followed, mode="R3", eval_mode=eval_mode) as following:
            for tokens in texts():
                following.put(rollout(tokens)[0], tokens)
            with following.paused():
                record(followed, fed)
            seen.calls.clear()
            for _ in range(2):
                got = record(followed, fed, seen)
            assert all(torch.equal(got[4][n][:-1], ids[:, n]) == eval_mode for n in range(LAYERS))
            assert following.left_alone == {"while paused": 1} | ({} if eval_mode else {"in eval mode": 2})
        warned = [message for message in caplog.messages if "follow(model, eval_mode=True)" in message]
        assert len(warned) == (not eval_mode)


def test_far_routes_are_found_in_the_first_update_where_the_first_calls_record(followed: Any) -> None:
    fed = padded(texts(8))
    with npu_replay.follow(followed, min_overlap=0.95):
        record(followed, fed)
        learn(followed, fed)  # its own record
    with npu_replay.follow(followed, min_overlap=0.95):
        record(followed, fed)
        record(followed, fed)
        move(followed)
        with pytest.raises(MicroBatchError, match=r"(?s)micro-batch 2.*min_overlap"):
            learn(followed, fed)


def test_a_mask_may_be_of_any_dtype(followed: Any) -> None:
    fed = padded(texts(), left=1)
    with npu_replay.follow(followed) as following:
        record(followed, (fed[0] | {"attention_mask": fed[0]["attention_mask"].bfloat16()}, []))
        learn(followed, fed)
        assert following.metrics()["replayed"] == 5


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_a_loss_on_other_texts_is_left_to_the_routers(recompute: str | None) -> None:
    """PPO-ptx, or SFT beside GRPO: nobody recorded these tokens. Its recomputes choose as its forward did."""
    followed = model(recompute=recompute)
    fed, others = padded(texts()), padded(texts(3, seed=1))
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, fed, seen)
        move(followed)
        with pytest.raises(MicroBatchError, match=r"ptx.*paused\(\)"):
            learn(followed, others)
        seen.calls.clear()
        for _ in range(5):  # unchecked micro-batches, too
            learn(followed, fed)
            assert_replayed(seen, fed, wanted)
            with following.paused():
                learn(followed, others)
            assert len(seen.calls) == LAYERS * (2 if recompute else 1)
            assert all(torch.equal(ids, own) for _, ids, own in seen.calls)
            seen.calls.clear()
        assert following.metrics()["replayed"] == 5 * len(wanted)


def test_the_store_is_bounded_and_says_what_it_dropped(
    followed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sequences = texts()
    size = LAYERS * TOPK + 1  # bytes a token
    room = sum(len(sequence) for sequence in sequences[1:]) * size
    with npu_replay.follow(followed, max_bytes=room) as following, caplog.at_level(logging.WARNING):
        for sequence in sequences:
            record(followed, padded([sequence]))
        metrics = following.metrics()
        assert (metrics["held"], metrics["dropped"], metrics["held_bytes"]) == (4, 1, room)
        assert "the oldest are dropped" in caplog.text
        learn(followed, padded(sequences[1:]))
        with pytest.raises(MicroBatchError, match=rf"1 dropped for max_bytes={room},"):
            learn(followed, padded(sequences))
        record(followed, padded(texts(seed=1)))
        assert following.metrics()["held_bytes"] <= room
        assert len(caplog.records) == 1


def test_a_checkpoint_around_the_model_is_an_update(followed: Any) -> None:
    """A reentrant one calls it without grad first."""
    fed = padded(texts())
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, fed, seen)
        move(followed)
        inside = torch.ones(1, requires_grad=True)
        out = checkpoint(lambda scale: followed(**fed[0]).logits * scale, inside, use_reentrant=True)
        out.sum().backward()
        assert following.metrics()["recorded"] == 5
    assert len(seen.calls) == 2 * LAYERS
    assert_replayed(seen, fed, wanted)


def rollout(tokens: torch.Tensor, seed: int = 3) -> tuple[RoutedExperts, torch.Tensor]:
    """Routes of all tokens but the last, and the same as [layers][tokens, topk], sorted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(len(tokens) - 1, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(ids=ids, layers=range(LAYERS), num_experts=EXPERTS), ids.sort(2).values


def test_a_rollout_s_routes_are_replayed_in_every_pass_and_stay(followed: Any) -> None:
    """R3, of some of the samples: the others are recorded, as before."""
    sequences = texts()
    fed = padded(sequences, left=2, right=1)
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        rollouts = {}
        for at in (1, 3):
            routes, rollouts[at] = rollout(sequences[at], seed=at)
            following.put(routes, sequences[at])
        recorded = record(followed, fed, seen)
        move(followed)
        learn(followed, fed)
        updated = seen.of(fed[1])
        assert following.metrics()["recorded"] == 3
        assert following.metrics()["replayed"] == 2 + 5
    for at in range(5):
        for layer in range(LAYERS):
            if at in rollouts:
                assert torch.equal(recorded[at][layer][:-1], rollouts[at][:, layer])
                assert torch.equal(updated[at][layer][:-1], rollouts[at][:, layer])
            else:
                assert torch.equal(updated[at][layer], recorded[at][layer])


def test_routes_that_do_not_fit_are_refused_as_they_are_put(followed: Any) -> None:
    tokens = texts()[2]
    routes, _ = rollout(tokens)
    with npu_replay.follow(followed) as following:
        with pytest.raises(ReplayError, match="another number of tokens"):
            following.put(routes, tokens[:3])
        with pytest.raises(ReplayError, match="whose they are"):
            following.put(routes)
        marked = routes.sequence(0, len(routes), npu_replay.fingerprint(texts()[3]))
        with pytest.raises(ReplayError, match="other tokens"):
            following.put(marked, tokens)
        with pytest.raises(RouterError, match="missing from the routes"):
            following.put(routes.only([0, 1]), tokens)
        record(followed, padded([tokens]))
        assert following.metrics()["recorded"] == 1


def test_routers_that_an_update_reaches_past_the_model_are_an_error(followed: Any) -> None:
    fed = padded(texts())
    with npu_replay.follow(followed):
        record(followed, fed)
        with torch.no_grad():
            followed.model(**fed[0])  # as PEFT's generate does
        with pytest.raises(MicroBatchError, match="not through the __call__"):
            followed.model(**fed[0])


class Wrapper(torch.nn.Module):
    """Hands all on, as DDP and DeepSpeed's engine do."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__()
        setattr(self, name, module)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.name)(*args, **kwargs)


def test_arguments_of_a_wrapper_are_those_of_the_model_in_it(followed: Any) -> None:
    """A batch in one argument: tests/routes/test_inputs.py."""
    fed = padded(texts(), left=2)
    wrapper = Wrapper(followed, "module")

    def call(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return wrapper(input_ids, attention_mask)

    seen = Seen(followed)
    with npu_replay.follow(wrapper):
        wanted = record(call, fed, seen)
        move(followed)
        learn(call, fed)
    assert_replayed(seen, fed, wanted)


def test_arguments_without_names_of_an_unknown_wrapper_are_refused(followed: Any) -> None:
    fed = padded(texts(), left=2)
    wrapper = Wrapper(followed, "inner")
    with npu_replay.follow(wrapper), torch.no_grad():
        with pytest.raises(MicroBatchError, match="have no names"):
            wrapper(fed[0]["input_ids"], fed[0]["attention_mask"])
        wrapper(**fed[0])


def test_a_block_in_which_nothing_ran_is_an_error_and_one_of_evaluations_is_not(followed: Any) -> None:
    fed = padded(texts())
    with pytest.raises(MicroBatchError, match="nothing ran"), npu_replay.follow(followed):
        pass
    with npu_replay.follow(followed):
        followed.eval()
        record(followed, fed)


def test_several_chunks_and_no_room_are_refused() -> None:
    with pytest.raises(RouterError, match="one model"):
        npu_replay.follow([model(), model()])
    with pytest.raises(ReplayError, match="max_bytes"):
        npu_replay.follow(model(), max_bytes=0)


@pytest.mark.slow
def test_a_long_run_holds_nothing_but_its_store() -> None:
    followed = model(recompute="non-reentrant")
    fed = padded(texts(2))
    gc.collect()
    gc.freeze()
    counts = []
    with npu_replay.follow(followed):
        for _ in range(20):
            record(followed, fed)
            learn(followed, fed)
            counts.append(sum(isinstance(value, torch.Tensor) for value in gc.get_objects()))
    gc.unfreeze()
    assert max(counts[10:]) <= max(counts[5:10])
