"""ms-swift's own Hugging Face trainer replays, by the plug-in and the callback of docs/trl.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import jobs

pytest.importorskip("swift", reason="ci/trainers.sh runs these tests, with ms-swift")

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
FREE = 1 / 28
"""Of 8 experts, 2: how often a router that chooses by itself does as random routes say."""

CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "last token too": {"last": True},
    "padded on the left": {"options": {"padding_side": "left"}},
    "packed": {"options": {"padding_free": True}},
    "no checkpointing": {"options": {"gradient_checkpointing": False}},
    "LoRA with its reference": {
        "options": {"tuner_type": "lora", "beta": 0.1, "target_modules": ["q_proj", "v_proj"]}
    },
    "a reference model": {"options": {"beta": 0.1}},
}


def run(**task: Any) -> dict[str, Any]:
    [plugin] = re.findall(r"```python\n(# replay.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    task = {"options": {}, "plugin": plugin} | task
    return jobs.run(
        "on_swift.job:run", task, fresh=True, env={"HF_HUB_OFFLINE": "1", "NPU_REPLAY_MIN_OVERLAP": "0"}
    )


def with_replay(mode: str = "R3", **task: Any) -> dict[str, Any]:
    return run(**task | {"options": task.get("options", {}) | {"callbacks": [f"npu_replay_{mode}"]}})


@pytest.mark.parametrize("case", CASES)
def test_policy_passes_take_the_engines_experts(case: str) -> None:
    outcome = with_replay(**CASES[case])
    assert not outcome["problem"]
    assert outcome["wrong"] == 0
    assert outcome["replayed"] > 1000
    assert (outcome["recomputed"] > 0) == (case != "no checkpointing")
    assert outcome["count"]["record"] >= 4
    assert outcome["count"]["update"] == 8
    if case == "LoRA with its reference":
        assert outcome["count"]["reference"] >= 4
        assert outcome["free"] < 3 * FREE * outcome["replayed"]


def test_as_released_nothing_is_replayed_and_nothing_says_so() -> None:
    outcome = run()
    assert not outcome["problem"]
    assert outcome["wrong"] > 0.9 * outcome["replayed"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an engine that isn't asked": ({"routes": False}, "enable_return_routed_experts"),
    "a sample without": ({"missing": True}, "one sample has none"),
    "routes of a shorter text": ({"cut": 3}, "another number of rows|another number of tokens"),
}


@pytest.mark.parametrize("what", BAD)
def test_routes_that_lack_or_lie_elsewhere_end_the_run(what: str) -> None:
    task, message = BAD[what]
    outcome = with_replay(**task)
    assert re.search(message, outcome["problem"])
    assert outcome["count"].get("update", 0) == 0


def test_without_the_import_there_is_no_such_callback() -> None:
    assert "npu_replay_R3" in with_replay(plugin="")["problem"]


def test_r2_takes_the_experts_of_the_old_log_probs() -> None:
    outcome = with_replay("R2", routes=False)
    assert not outcome["problem"]
    assert outcome["updates"] > 1000
    assert outcome["otherwise"] == 0
    assert run(routes=False)["otherwise"] > 100  # the control: the routers do move
