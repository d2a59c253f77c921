"""follow on packed rows whose padded end has positions of its own, 0, 1, 2, as verl pads for Ulysses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ReplayError
from npu_replay.following.fed_sequences import fed_sequences

pytest.importorskip("transformers")

from sessions.test_carried_routes import carried, rollout
from sessions.test_follow import (
    Fed,
    Seen,
    assert_replayed,
    learn,
    model,
    move,
    packed,
    padded,
    record,
    texts,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning"),
    pytest.mark.usefixtures("unjudged"),
]


def by_hand(ids: torch.Tensor, positions: torch.Tensor, to: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What verl's `ulysses_pad` does for so many ranks; tests/on_verl holds it against that."""
    size = -ids.shape[1] % to
    return (
        torch.nn.functional.pad(ids, (0, size), value=0),
        torch.cat([positions, torch.arange(size)[None]], dim=1),
    )


def ending(sequences: Sequence[torch.Tensor], to: int) -> Fed:
    """Packed, and padded to a multiple of `to`."""
    fed, places = packed(sequences)
    ids, positions = by_hand(fed["input_ids"], fed["position_ids"], to)
    return {"input_ids": ids, "position_ids": positions}, places


def counts(following: Any) -> tuple[float, ...]:
    return tuple(following.metrics()[name] for name in ("recorded", "replayed", "held"))


@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("after", [1, 2, 8, 16])
@pytest.mark.parametrize("before", [1, 2, 8, 16])
def test_a_padded_end_is_no_sequence_however_long_it_is(
    before: int, after: int, recompute: str | None
) -> None:
    """35 tokens: ends of 0, 1, 5 and 13 tokens, in the record and in the update."""
    followed = model(recompute=recompute)
    sequences = texts()
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, ending(sequences, before), seen)
        move(followed)
        fed = ending(sequences, after)
        learn(followed, fed)
        assert counts(following) == (5, 5, 5)
    for _, ids, own in seen.calls:
        assert torch.equal(ids[35:], own[35:]), "padding chooses by itself"
    assert_replayed(seen, fed, wanted)


def test_a_row_may_end_with_the_models_own_padding() -> None:
    """And each row of several."""
    followed = model()
    sequences = texts()
    followed.config.pad_token_id = 77
    one, other = (ending(part, 24)[0] for part in (sequences[:3], sequences[3:4]))
    for fed, length in ((one, 15), (other, 9)):
        fed["input_ids"][0, length:] = 77
    rows = {name: torch.cat([one[name], other[name]]) for name in one}
    places = [*packed(sequences[:3])[1], 24 + torch.arange(9)]
    seen = Seen(followed)
    with npu_replay.follow(followed) as following:
        wanted = record(followed, (rows, places), seen)
        move(followed)
        learn(followed, (rows, places))
        assert_replayed(seen, (rows, places), wanted)
        assert counts(following) == (4, 4, 4)


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
        assert counts(following) == (3, 3, 3)


@pytest.mark.parametrize("empty", [0, -1])
@pytest.mark.parametrize("to", [1, 2, 8])
def test_a_padded_end_carries_no_routes(to: int, empty: int) -> None:
    followed = model()
    fed = ending(texts(), to)
    wanted = rollout(fed)
    seen = Seen(followed)
    call = fed[0] | {"routed_experts": carried(fed, wanted, empty=empty)}
    with npu_replay.follow(followed, mode="R3") as following:
        learn(followed, (call, fed[1]))
        for _, ids, own in seen.calls:
            assert torch.equal(ids[35:], own[35:]), "padding chooses by itself"
        assert_replayed(seen, fed, wanted)
        holed = call["routed_experts"].clone()
        holed[0, 33] = empty  # a token of the last sequence
        with pytest.raises(ReplayError, match="a token has no route"):
            learn(followed, (call | {"routed_experts": holed}, fed[1]))
        assert following.metrics()["carried"] == 1


def test_keys_are_those_of_the_sequences_alone() -> None:
    fed, _ = ending(texts(), 8)
    alone = fed_sequences(packed(texts())[0], {}, [*"abcde"])
    found = fed_sequences(fed, {}, [*"abcde"])
    assert found.marks[:5] == alone.marks
    with pytest.raises(MicroBatchError, match="another number of sample keys"):
        fed_sequences(fed, {}, [*"abcd"])
