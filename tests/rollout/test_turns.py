"""A sample that grows turn by turn, over an engine whose row is a known function of the token, its place and
the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choice import examples
from npu_replay import MicroBatchError, ReplayError, Rollout, RoutedExperts, RoutedModel, Turn, fingerprint

MODEL = RoutedModel(layers=(1, 2, 3), num_layers=4, num_experts=300, topk=4)


def row(token: int, place: int, version: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([token, place, version])
    return np.stack([generator.permutation(300)[:4] for _ in MODEL.layers])


def routes_of(tokens: list[int], version: int = 1, rows: int | None = None) -> RoutedExperts:
    """What an engine shows of this sequence: nothing of the last token; only `rows` if it was stopped."""
    ran = len(tokens) - 1 if rows is None else rows
    ids = np.zeros((len(tokens), 3, 4), np.int64)
    for place in range(ran):
        ids[place] = row(tokens[place], place, version)
    return RoutedExperts(
        ids=ids,
        layers=MODEL.layers,
        num_experts=300,
        recorded=np.arange(len(tokens)) < ran,
        fingerprint=fingerprint(tokens),
        weight_version=version,
    )


def turn(prompt: list[int], sampled: list[int], version: int = 1, **settings: Any) -> Turn:
    return Turn(prompt=prompt, sampled=sampled, routes=routes_of(prompt + sampled, version), **settings)


def grown(*steps: Any, **settings: Any) -> Rollout:
    """A sample of these turns, tokens that nobody sampled (lists), and ("latest", turn)."""
    rollout = Rollout(MODEL, **settings)
    for step in steps:
        if isinstance(step, list):
            rollout.append(step)
        elif isinstance(step, Turn):
            rollout.extend(step)
        else:
            rollout.extend(step[1], keep=step[0])
    return rollout


def check(rollout: Rollout, tokens: list[int], versions: list[int | None]) -> None:
    """Each row is that of its token, place and weights, or there is none."""
    routes = rollout.routes
    assert rollout.tokens.tolist() == tokens
    assert rollout.weight_versions == versions
    assert routes.recorded.tolist() == [version is not None for version in versions]
    assert routes.fingerprint == fingerprint(tokens)
    for place, version in enumerate(versions):
        wanted = np.zeros((3, 4)) if version is None else row(tokens[place], place, version)
        assert np.array_equal(routes.ids[place].numpy(), wanted), place


# the steps of `grown`; then all tokens, and the weights of each row
STORIES: dict[str, tuple[list[Any], list[int], list[int | None]]] = {
    "the last token and a tool's have no row": (
        [turn([5, 6], [7, 8]), [20, 21]],
        [5, 6, 7, 8, 20, 21],
        [1, 1, 1, None, None, None],
    ),
    "the next turn fills both (NeMo-RL#3485)": (
        [turn([5, 6], [7, 8]), [20, 21], turn([5, 6, 7, 8, 20, 21], [9])],
        [5, 6, 7, 8, 20, 21, 9],
        [1] * 6 + [None],
    ),
    "what was known before a turn was not sampled by it": (
        [turn([5, 6, 7, 8], [], aborted=True), turn([5, 6], [7, 8, 9], version=2)],
        [5, 6, 7, 8, 9],
        [1, 1, 1, 2, None],
    ),
    "T13 a resume after an abort doubles nothing": (
        [turn([5, 6], [7, 8, 9], aborted=True), turn([5, 6, 7, 8, 9], [10, 11])],
        [5, 6, 7, 8, 9, 10, 11],
        [1] * 6 + [None],
    ),
    "T14 a resume prefills all with new weights; what the old sampled from is theirs": (
        [turn([5, 6], [7, 8], aborted=True), turn([5, 6, 7, 8], [9, 10], version=2)],
        [5, 6, 7, 8, 9, 10],
        [1, 1, 1, 2, 2, None],
    ),
    "T14 the caller's word takes the rows of the new weights": (
        [turn([5, 6], [7, 8], aborted=True), ("latest", turn([5, 6, 7, 8], [9, 10], version=2))],
        [5, 6, 7, 8, 9, 10],
        [2] * 5 + [None],
    ),
    "T28 nobody knows how 7 and 8 were sampled, and a later prefill doesn't tell": (
        [Turn(prompt=[5, 6], sampled=[7, 8], aborted=True), turn([5, 6, 7, 8], [9, 10], version=2)],
        [5, 6, 7, 8, 9, 10],
        [2, None, None, 2, 2, None],
    ),
    "an engine leaves out what earlier turns have (routed_experts_prompt_start)": (
        [
            turn([5, 6], [7, 8]),
            replace(
                turn([5, 6, 7, 8, 20], [9]), routes=routes_of([5, 6, 7, 8, 20, 9]).take([-1, -1, -1, 3, 4, 5])
            ),
        ],
        [5, 6, 7, 8, 20, 9],
        [1, 1, 1, 1, 1, None],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_each_row_is_of_the_time_that_its_token_was_sampled_from(story: str) -> None:
    steps, tokens, versions = STORIES[story]
    rollout = grown(*steps)
    check(rollout, tokens, versions)
    known = set(versions) - {None}
    assert rollout.routes.weight_version == (known.pop() if len(known) == 1 else None)


def test_weights_that_changed_within_a_turn() -> None:
    """An engine whose weights were exchanged while it sampled says which tokens are whose."""
    whole = turn([5, 6], [7, 8, 9])
    rollout = grown(replace(whole, weight_versions=["a", "a", "a", "b", "b"]))
    assert rollout.weight_versions == ["a", "a", "a", "b", None]
    assert rollout.routes.weight_version is None
    with pytest.raises(ReplayError, match=r"number of weight versions.*Expected 5"):
        grown(replace(whole, weight_versions=["a"]))


def test_routes_of_new_tokens_alone_of_others_or_of_another_model_are_refused_t30() -> None:
    """A multi-turn prefix that was left out would shift all rows."""
    rollout = grown(turn([5, 6], [7, 8]), name="sample 3")
    assert repr(rollout) == "Rollout('sample 3', 1 turns, 4 tokens, 3 rows with a route)"
    for tokens, words in (([20, 9], "another number of tokens"), ([5, 6, 7, 8, 20, 8], "other tokens")):
        with pytest.raises(ReplayError, match=f"turn 2: the routes .*{words}"):
            rollout.extend(Turn(prompt=[5, 6, 7, 8, 20], sampled=[9], routes=routes_of(tokens)))
    assert (len(rollout), rollout.turns) == (4, 1)
    other = RoutedModel(layers=(0, 1, 2), num_layers=4, num_experts=300, topk=4)
    with pytest.raises(ReplayError, match="another model"):
        Rollout(other).extend(turn([5, 6], [7]))


def from_row(turn: Turn, start: int) -> Turn:
    """The turn of a request that asked for rows from `start` on."""
    routes = turn.routes
    kept = routes.recorded & (torch.arange(len(routes)) >= start)
    return replace(turn, routes=routes.with_rows(routes.ids, kept, fingerprint=routes.fingerprint))


@pytest.mark.parametrize(("start", "gaps"), [(3, 0), (4, 1), (5, 2), (6, 3)])
def test_a_start_beyond_the_first_unknown_row_is_refused(start: int, gaps: int) -> None:
    """Row 3 is of the last token that was sampled, and rows 4 and 5 are of a tool's."""
    rollout = grown(turn([1, 2], [3, 4]), [5, 6])
    second = from_row(turn([1, 2, 3, 4, 5, 6], [7, 8]), start)
    if not gaps:
        rollout.extend(second)
        check(rollout, [1, 2, 3, 4, 5, 6, 7, 8], [1] * 7 + [None])
        return
    words = (
        f"turn 2: this turn leaves out {gaps} rows .*Expected the rows from token 3 on, got .* token {start}"
    )
    with pytest.raises(ReplayError, match=words):
        rollout.extend(second)
    check(rollout, [1, 2, 3, 4, 5, 6], [1] * 3 + [None] * 3)  # nothing of it was taken
    lenient = grown(turn([1, 2], [3, 4]), second, missing="native")
    assert lenient.routes.recorded.tolist() == [True] * 3 + [False] * gaps + [True] * (4 - gaps) + [False]


def test_a_start_is_right_after_an_abort_without_rows_and_in_turns_that_are_merged() -> None:
    """A row that an aborted turn sampled from stays unknown: nobody brings it any more."""
    rollout = grown(
        turn([1, 2], [3, 4]),
        Turn(prompt=[1, 2, 3, 4, 5], sampled=[6, 7], aborted=True),
        turn([1, 2, 3, 4, 5, 6, 7], [8]),
        from_row(turn([1, 2, 3, 4, 5, 6, 7, 8], [9]), 7),
    )
    assert rollout.routes.recorded.tolist() == [True] * 4 + [False] * 2 + [True] * 2 + [False]
    samples = [grown(turn([1, 2], [3, 4])), grown(from_row(turn([1, 2, 3, 4, 5], [6]), 3))]
    assert Rollout.merge(samples).routes.recorded.tolist() == [True] * 5 + [False]


def test_text_that_was_tokenised_again_is_caught() -> None:
    rollout = grown(turn([5, 6], [7, 8]))
    for prompt, at in (([5, 6, 7, 9], 3), ([5, 60, 7, 8], 1), ([5, 6, 7], 3)):
        with pytest.raises(ReplayError, match=rf"they part at token {at}\b.*tokenised again"):
            rollout.extend(turn(prompt, [1] if at < 3 else []))
    check(rollout, [5, 6, 7, 8], [1, 1, 1, None])


def test_a_turn_without_routes_is_an_error_unless_it_was_aborted() -> None:
    with pytest.raises(ReplayError, match=r"Rollout sample 17, turn 1: this turn has no routes.*capture"):
        grown(Turn(prompt=[5, 6], sampled=[7]), name="sample 17")
    check(grown(Turn(prompt=[5, 6], sampled=[7]), missing="native"), [5, 6, 7], [None] * 3)


def test_the_prompt_ends_where_the_first_token_was_sampled() -> None:
    """Not with the first call of the engine: that may have been aborted, or its tokens cut off again."""
    rollout = Rollout(MODEL)
    steps: list[tuple[Callable[[], None], int]] = [
        (lambda: rollout.extend(Turn(prompt=[5, 6], sampled=[], aborted=True)), 2),
        (lambda: rollout.append([7, 8]), 4),
        (lambda: rollout.extend(turn([5, 6, 7, 8], [9, 10])), 4),
        (lambda: rollout.extend(turn([5, 6, 7, 8, 9, 10, 20], [11])), 4),
        (lambda: rollout.truncate(5), 4),
        (lambda: rollout.truncate(1), 1),  # it starts again
        (lambda: rollout.extend(turn([5, 6, 20], [9, 10])), 3),
    ]
    for step, length in steps:
        step()
        assert rollout.prompt_length == length
    assert Rollout.merge([grown([5]), rollout]).prompt_length == 3


def test_samples_merge_into_one() -> None:
    """Frameworks that make a sample of each turn; the versions of rows come along."""
    first = grown(turn([5, 6], [7], version=1))
    second = grown(turn([5, 6, 7, 20], [8], version=2))
    third = grown(turn([5, 6, 7, 20, 8], [9], version=3))
    merged = Rollout.merge([first, second, third])
    check(merged, [5, 6, 7, 20, 8, 9], [1, 1, 2, 2, 3, None])
    assert (merged.prompt_length, merged.turns) == (2, 3)
    with pytest.raises(ReplayError, match="part at token"):
        Rollout.merge([second, first])
    with pytest.raises(ReplayError, match="can't be merged"):
        Rollout.merge([])


@examples(60)
@given(st.data())
def test_any_conversation_keeps_each_row_of_its_time(data: st.DataObject) -> None:
    """Turns, tools, aborts with and without routes, cuts, changing weights: against a table kept by hand."""
    rollout = Rollout(MODEL)
    tokens = [3, 4]
    versions = [None, None]
    sampled_from = [False, False]
    rollout.append(tokens)
    for version in range(1, data.draw(st.integers(2, 6))):
        tool = data.draw(st.lists(st.integers(0, 99), max_size=3))
        sampled = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        lost = data.draw(st.booleans())
        latest = data.draw(st.booleans())
        cut = data.draw(st.integers(1, 2 * len(tokens)))
        rollout.truncate(cut)
        tokens, versions, sampled_from = tokens[:cut], versions[:cut], sampled_from[:cut]
        sampled_from[-1] = False
        if data.draw(st.booleans()):
            rollout.append(tool)
        prompt = tokens + tool
        tokens = prompt + sampled
        versions += [None] * (len(tokens) - len(versions))
        sampled_from += [False] * (len(tokens) - len(sampled_from))
        routes = None if lost else routes_of(tokens, version)
        rollout.extend(
            Turn(prompt=prompt, sampled=sampled, routes=routes, aborted=lost), "latest" if latest else "first"
        )
        for place in range(len(tokens) - 1):
            anew = place >= len(prompt) - 1 and not sampled_from[place]
            if lost and anew:
                versions[place] = None
            elif not lost and (latest or anew or (versions[place] is None and not sampled_from[place])):
                versions[place] = version
            sampled_from[place] |= anew
    check(rollout, tokens, versions)


def test_a_sample_key_is_part_of_the_fingerprint_of_what_its_turns_show() -> None:
    """Two images that were asked the same question; an engine's routes have no key."""
    routes = routes_of([11, 12, 13])
    for key in ("left", "right", None):
        rollout = grown(Turn(prompt=[11, 12], sampled=[13], routes=routes), [14], sample_key=key)
        assert rollout.routes.fingerprint == fingerprint([11, 12, 13, 14], sample_key=key)
        assert Rollout.merge([rollout]).routes == rollout.routes
    left = grown(Turn(prompt=[11, 12], sampled=[13], routes=routes.of_sample("left")), sample_key="left")
    with pytest.raises(MicroBatchError, match="of these tokens, and have another sample_key"):
        left.extend(Turn(prompt=[11, 12], sampled=[13], routes=routes.of_sample("right")))
    with pytest.raises(ReplayError, match="needs routes with a fingerprint"):
        routes.take([0]).of_sample("left")
