"""The bench measures what it says. No test looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import npu_replay
from benchmarks import cases, decode, delivery, gather, host, imports, layout, opening
from benchmarks import run as bench

SMALL: list[tuple[Any, str, Any]] = [
    (cases, "TOKENS", (16,)),
    (cases, "ROUTER", cases.ROUTER | {"hidden_size": 32}),
    (cases, "STEP", cases.STEP | {"hidden_size": 32}),
    (host, "ROUTERS", 2),
    (gather, "SEQUENCES", 3),
    (layout, "TOKENS", 1024),
    (opening, "MODEL", opening.MODEL | {"num_layers": 2}),
    (decode, "TOKENS", 200),
    (decode, "PROMPT", 50),
]
WAYS = {
    "router": ["live", "record", "replay", "record by Watch", "replay by Watch"],  # then Megatron's own
    "other top-k": ["live", "in a block"],
    "wrapper": ["live", "off"],
    "gather": ["take, all 48", "take, cut to 12", "gather 12 of 48"],
    "decode": [
        *("plain copy", "vLLM, array of uint8", "vLLM, base64 of .npy"),
        *("SGLang, base64 of int32", "base64 alone"),
    ],
    "capture": ["routers alone", "captured"],
    "step": ["live", "record", "replay"],
    "open and close": ["one walk of modules()", "record", "replay", "pin_recompute"],
    "layout": ["forward", "layout read", "such lengths again"],
    "import": ["torch", "then npu_replay", "then its record"],
}


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.first_release
@pytest.mark.usefixtures("megatron")
def test_every_way_is_measured_against_the_live_one_of_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a busy machine's figures are wider, and would cut the names short
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)
    times = imports.times
    monkeypatch.setattr(imports, "times", lambda rounds: times(1))  # each is a process that imports torch
    made_of_sizes = (gather.rollout, decode.sample)
    for cached in made_of_sizes:
        cached.cache_clear()
    out = tmp_path / "bench.json"
    rows = bench.main(device="auto", pairs=1, out=out, force=False)
    for what, ways in WAYS.items():
        assert [row.way for row in rows if row.what == what][: len(ways)] == ways
    assert all(row.ratio == 1 and row.over == 0 for row in rows if row.way == "live")
    assert all(row.microseconds > 0 and row.ratio_low <= row.ratio <= row.ratio_high for row in rows)
    waits = {row.way: row.waits for row in rows if row.what.startswith("host")}
    assert waits["live"] == waits["least replay"] == 0
    assert waits["replay"] == waits["pin_recompute"] == 1, "a CPU's own check at the forward's end"
    assert "memory beside the answer" in capfd.readouterr().out
    assert json.loads(out.read_text())["rows"][0]["way"] == "live"
    with pytest.raises(npu_replay.ReplayError, match=r"not overwritten.*--force"):
        bench.main(device="auto", pairs=1, out=out, force=False)
    for cached in made_of_sizes:
        cached.cache_clear()


@pytest.mark.parametrize("pairs", [1, 0])
def test_the_job_is_planned_and_its_parts_are_measured(
    pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With no pairs it is planned alone."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(delivery, "TOKENS", 64)
    out = tmp_path / "delivery.json"
    arguments = ["delivery", "--pairs", str(pairs), "--layers", "4", "--pp", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    delivery.samples.cache_clear()
    delivery.main(**delivery._options())
    delivery.samples.cache_clear()
    printed = capfd.readouterr().out
    assert "Planned: 2 ranks on 1 node," in printed
    assert ("Measured" in printed) == bool(pairs)
    if pairs:
        ways = [(row["what"], row["way"]) for row in json.loads(out.read_text())["rows"]]
        assert {what for what, _ in ways} == {"put", "fetch", "gather"}
        assert {("fetch", delivery.SHARE), ("gather", delivery.EVERY)} <= {*ways}
        assert printed.count(": met") + printed.count(": not met") == 5
