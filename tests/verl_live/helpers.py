"""What a verl job takes by a path: a tool, and a reward that can be checked."""

from __future__ import annotations

from typing import Any

from verl.tools.function_tool import function_tool


@function_tool
def after(number: int) -> str:
    """The numbers that come after one.

    Args:
        number: the one before.
    """
    return f"w{number + 10} w{number + 11}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The share of even numbers."""
    numbers = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    return sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)
