"""What npu_replay changes in the Megatron-core on the path: little, reported, undone without a trace."""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

import jobs
from dealt_cases import import_orders

pytestmark = [pytest.mark.megatron, pytest.mark.capability("report")]

WRAPPED = {
    "megatron.core.transformer.moe.router.TopKRouter.__init__",
    "megatron.core.transformer.transformer_config.MLATransformerConfig.__init__",
    "megatron.core.transformer.transformer_config.TransformerConfig.__init__",
}
"""What is there on every release and wrapped on every release: flags, and what instances are given."""
TOPK = "megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function"
"""In 0.14 and 0.15 it is there, and takes no router_replay."""
ALIAS = "megatron.core.transformer.moe.router.topk_routing_with_score_function"
"""The same function: one line of the report stands for both."""
UPSTREAMS = "megatron.core.transformer.moe.router_replay"
SERVED = "module None"
"""A module that has no file, as a snapshot describes it."""


@functools.cache
def snapshot(came: str) -> dict[str, Any]:
    """What a process found in which npu_replay was imported first, before Megatron, or last.

    ci/matrix_run.py has one server for all processes of all releases, and lays down what they found.
    """
    made = Path(os.environ.get("NPU_REPLAY_MATRIX_RESULT", "none")).with_suffix(f".{came}.json")
    if made.exists():
        return json.loads(made.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    return jobs.run("megatron_snapshot:with_npu_replay", {"came": came}, env={"NPU_REPLAY_DISABLE": "0"})


def different(attributes: dict[str, str], other: dict[str, str]) -> set[str]:
    return {path for path in attributes.keys() | other.keys() if attributes.get(path) != other.get(path)}


def untouched() -> dict[str, str]:
    """What Megatron's modules held before npu_replay came."""
    attributes: dict[str, str] = snapshot("last")["untouched"]
    assert len(attributes) > 1000
    return attributes


@pytest.mark.parametrize("came", import_orders())
def test_uninstall_puts_every_attribute_back_and_a_second_install_changes_nothing(came: str) -> None:
    """Whether npu_replay is imported before Megatron or after it."""
    result = snapshot(came)
    assert result["report"] == snapshot("last")["report"] != []
    assert result["installed"] == snapshot("last")["installed"]
    assert different(result["installed"], untouched()) >= WRAPPED
    assert result["changed by a second install"] == []
    assert result["report again"] == result["report"]
    assert different(result["uninstalled"], untouched()) == set()
    assert result["report after"] == []
    assert result.get("left behind", []) == []


def test_what_the_release_has_itself_is_left_to_it() -> None:
    """Changed are what it lacks and three constructors: on 0.16 and later, nothing of upstream's replay."""
    installed = snapshot("last")["installed"]
    before = untouched()
    replaced = {path for path in different(installed, before) if path in before} - WRAPPED
    assert replaced <= (set() if UPSTREAMS in before else {TOPK, ALIAS})


def test_every_change_is_in_the_report() -> None:
    report = "\n".join(snapshot("last")["report"])
    installed = snapshot("last")["installed"]
    changed = different(installed, untouched()) - {ALIAS}
    served = [path for path in changed if installed.get(path) == SERVED]
    for path in changed:
        assert path in report or any(path.startswith(f"{module}.") for module in served)


def test_upstreams_own_router_replay_is_the_one_that_is_imported() -> None:
    from megatron.core.transformer.moe import moe_utils

    own = Path(moe_utils.__file__).with_name("router_replay.py")
    if not own.exists():
        assert snapshot("last")["installed"][UPSTREAMS] == SERVED
        assert any(UPSTREAMS in line for line in snapshot("last")["report"])
        return
    from megatron.core.transformer.moe import router_replay

    assert Path(inspect.getfile(router_replay.RouterReplay)) == own
    assert not any(UPSTREAMS in line for line in snapshot("last")["report"])
