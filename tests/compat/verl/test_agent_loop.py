"""What the turns of one sample have shown, without verl."""

from __future__ import annotations

import numpy as np
import pytest

from npu_replay.compat.verl.agent_loop import Turns

PROMPT = [1, 2, 3]
NONE = 0
"""In the place of weights: a row without a route."""

CASES = {
    "one turn": ([(PROMPT, [4, 5], 1)], [1, 1, 1, 1, NONE]),
    "a turn after a tool": ([(PROMPT, [4], 1), ([*PROMPT, 4, 5], [6], 2)], [1, 1, 1, 2, 2, NONE]),
    "another answer to the same prompt": ([(PROMPT, [8, 9], 1), (PROMPT, [4, 5], 2)], [1, 1, 2, 2, NONE]),
    "an answer that was cut and gone on with": (
        [(PROMPT, [4, 9], 1), ([*PROMPT, 4], [5], 2)],
        [1, 1, 1, 2, NONE],
    ),
    "branches in turn": (
        [(PROMPT, [4], 1), (PROMPT, [8], 2), ([*PROMPT, 4], [5], 3), ([*PROMPT, 8], [9], 4)],
        [1, 1, 1, 3, NONE],
    ),
    "a turn without routes": ([(PROMPT, [4], None), ([*PROMPT, 4], [5], 2)], [2, 2, NONE, 2, NONE]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_row_is_of_the_turn_that_sampled_from_it(case: str) -> None:
    answers, wanted = CASES[case]
    turns = Turns()
    for prompt, sampled, weights in answers:
        rows = None if weights is None else np.full((len(prompt) + len(sampled) - 1, 2, 2), weights, np.int32)
        turns.add(np.array(prompt), np.array(sampled), rows, aborted=False)
    tokens = np.array([*PROMPT, 4, 5, 6][: len(wanted)])
    rows, seen = turns.routes_of(tokens)
    assert rows is not None
    assert rows[:, 0, 0].tolist() == wanted
    assert rows.dtype == np.int16
    assert seen == len(tokens)


def test_turns_of_two_models_are_no_sample() -> None:
    turns = Turns()
    turns.add(np.array([1]), np.array([2, 3]), np.ones((2, 3, 2), np.uint8), aborted=False)
    turns.add(np.array([1, 2, 3]), np.array([4]), np.ones((3, 4, 2), np.uint8), aborted=False)
    with pytest.raises(ValueError, match="shape mismatch"):
        turns.routes_of(np.array([1, 2, 3, 4]))
    assert turns.routes_of(np.array([9, 9])) == (None, 0)
