"""examples/README.md shows what each script of examples/verl adds to verl's own example."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
SCRIPTS = sorted(FOLDER.glob("*_*.sh"))
NEW_KEYS = ("actor_rollout_ref.actor.fsdp_config.router_replay", "ray_kwargs.ray_init.runtime_env.env_vars")
"""Those that verl's own config lacks, so that a line has to begin with a +."""


def lines(config: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in config.items():
        key = f"{above}.{name}".lstrip(".")
        if isinstance(value, dict):
            yield from lines(value, key)
        else:
            yield f"{'+' * key.startswith(NEW_KEYS)}{key}={value}"


def typed(line: str) -> str:
    """As it is typed in a shell."""
    return f'"{line}"' if "'" in line else line


def handed_on(script: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """verl's example, and what it is called with; a script in its place says it."""
    (line,) = re.findall(r"(?m)^run (\S+) ", script.read_text(encoding="utf-8"))
    example = tmp_path / "examples" / line
    example.parent.mkdir(parents=True)
    example.write_text('printf "%s\\n" "$@"\n')
    environment = os.environ | {"VERL": str(tmp_path)}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    replay, *more, _ = done.stdout.splitlines()
    config = yaml.safe_load((FOLDER / "replay" / f"{replay.removeprefix('+replay=')}.yaml").read_text())
    return f"examples/{line}", [*lines(config), *more]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_page_shows_what_a_script_adds(script: Path, tmp_path: Path) -> None:
    example, added = handed_on(script, tmp_path)
    releases = "v0.7.1" if "verl_0.7" in script.name else "v0.8.0, v0.9.0"
    shown = [
        f"--- verl {releases}: {example}",
        f"+++ {script.name}",
        *(f"+    {typed(line)} \\" for line in added),
    ]
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert "\n".join(["```diff", *shown, "```"]) in page
