"""ci/contracts.py on a real release: what it keeps, and that a change to its source is seen."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[2] / "ci"
MINE = {
    "vllm": [
        ("vllm/outputs.py", "routed_experts: np.ndarray", "expert_ids: np.ndarray", "rows"),
        ("vllm/engine/arg_utils.py", "--enable-return-routed-experts", "--return-routed-experts", "switch"),
    ],
    "sglang": [
        (
            "sglang/srt/managers/tokenizer_manager.py",
            'meta_info["routed_experts"]',
            'meta_info["re"]',
            "meta_info",
        ),
        (
            "sglang/srt/managers/io_struct.py",
            "return_routed_experts: bool",
            "return_experts: bool",
            "request",
        ),
    ],
}

CHANGES = [(engine, *change) for engine, changes in MINE.items() for change in changes]


@pytest.fixture(scope="module")
def check() -> Iterator[Callable[..., dict[str, list[str] | None]]]:
    """Hold the engine on the path to its contracts, some files with other text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        contracts = importlib.import_module("contracts")
        known = contracts.products((CI / "contracts.toml").read_text(encoding="utf-8"))

        def check(engine: str, **changed: str) -> Any:
            read = contracts.read_in(_root(engine))
            version = contracts.Version(importlib.metadata.version(engine))
            return known[engine].check(version, lambda path: changed.get(path, read(path)))

        yield check


def _root(engine: str) -> Path:
    spec = find_spec(engine)
    if spec is None or spec.origin is None:
        pytest.skip(f"{engine} isn't on the path")
    return Path(spec.origin).parents[1]


@pytest.mark.parametrize("engine", list(MINE))
def test_the_release_keeps_its_contracts(check: Any, engine: str) -> None:
    found = check(engine).values()
    assert not any(found)
    assert [] in found


@pytest.mark.parametrize(("engine", "file", "before", "after", "contract"), CHANGES)
def test_a_change_to_its_source_breaks_that_contract(
    check: Any, engine: str, file: str, before: str, after: str, contract: str
) -> None:
    source = (_root(engine) / file).read_text(encoding="utf-8")
    assert before in source
    found = check(engine, **{file: source.replace(before, after)})
    assert found[contract]
    assert all(f": {file}: " in line for lines in found.values() for line in lines or [])
