"""docs/models.md says what a stack can't do: its table has the expected failures of the contract."""

from __future__ import annotations

from pathlib import Path

from sessions.test_contract import UNABLE

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
ROWS = {"follow": "`follow`", "aux loss": '`aux_loss="replayed"`', "capacity": "capacity"}
STACKS = {"megatron": "Megatron", "megatron hybrid": "HybridModel"}
"""By what the page calls them; the others but the toy are transformers'."""


def test_the_page_has_the_expected_failures_of_every_stack() -> None:
    expected: dict[tuple[str, str], list[str]] = {}
    for row, reasons in UNABLE.items():
        for stack, why in reasons.items():
            names = expected.setdefault((ROWS[row], why), [])
            if stack != "toy" and (name := STACKS.get(stack, "transformers")) not in names:
                names.append(name)
    lines = [f"| {row} | {', '.join(names)} | {why} |" for (row, why), names in expected.items() if names]
    section = PAGE.read_text(encoding="utf-8").split("\n## What a stack can't do\n")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")][2:] == lines
