"""benchmarks.delivery runs, prints both tables, and says of each target whether it was met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import delivery as bench


@pytest.mark.parametrize("pairs", [1, 0])
def test_the_job_is_planned_and_its_parts_are_measured(
    pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With no pairs it is planned alone."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(bench, "TOKENS", 64)
    out = tmp_path / "bench.json"
    arguments = ["delivery", "--pairs", str(pairs), "--layers", "4", "--pp", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    bench.samples.cache_clear()
    bench.main(**bench._options())
    bench.samples.cache_clear()
    printed = capfd.readouterr().out
    assert "Planned: 2 ranks on 1 node," in printed
    assert ("Measured" in printed) == bool(pairs)
    if pairs:
        ways = [(row["what"], row["way"]) for row in json.loads(out.read_text())["rows"]]
        assert {what for what, _ in ways} == {"put", "fetch", "gather"}
        assert {("fetch", bench.SHARE), ("gather", bench.EVERY)} <= {*ways}
        assert printed.count(": met") + printed.count(": not met") == 5
