"""benchmarks.delivery runs, prints both tables, and says of each target whether it was met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import delivery as bench


def test_the_job_is_planned_and_its_parts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(bench, "TOKENS", 64)
    out = tmp_path / "bench.json"
    bench.samples.cache_clear()
    try:
        monkeypatch.setattr(
            "sys.argv", ["delivery", "--pairs", "1", "--layers", "4", "--pp", "2", "--out", str(out)]
        )
        bench.main(**bench._options())
    finally:
        bench.samples.cache_clear()
    printed = capfd.readouterr().out
    found = json.loads(out.read_text())
    ways = {
        what: [row["way"] for row in found["rows"] if row["what"] == what and row["way"] != "Ray"]
        for what in ("put", "fetch", "gather")
    }
    assert ways == {
        "put": ["copy", "as over Ray"],
        "fetch": ["copy", "as over Ray", bench.RANK, bench.SHARE],
        "gather": ["take", bench.ONE, bench.TAKEN, bench.EVERY],
    }
    assert found["planned"]["nodes"] == 1
    assert "Planned: 2 ranks on 1 node," in printed
    assert printed.count(": met") + printed.count(": not met") == 5

    monkeypatch.setattr("sys.argv", ["delivery", "--pairs", "0", "--layers", "4", "--pp", "2"])
    bench.main(**bench._options())
    printed = capfd.readouterr().out
    assert "Planned: 2 ranks on 1 node," in printed
    assert "Measured" not in printed
