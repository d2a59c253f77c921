"""The bench measures what it says, and nothing is left behind. No test looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import npu_replay
from benchmarks import cases
from benchmarks import decode as bench_decode
from benchmarks import gather as bench_gather
from benchmarks import host as bench_host
from benchmarks import layout as bench_layout
from benchmarks import opening as bench_opening
from benchmarks import run as bench
from npu_replay.seam.guarded import guard

pytestmark = [pytest.mark.megatron, pytest.mark.first_release, pytest.mark.usefixtures("megatron")]


@pytest.mark.slow
def test_every_way_is_measured_against_the_live_one_of_the_same_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import megatron.core

    monkeypatch.setenv("COLUMNS", "200")  # a busy machine's figures are wider, and would cut the names short
    monkeypatch.setattr(cases, "TOKENS", (16,))
    monkeypatch.setattr(bench_host, "ROUTERS", 2)
    monkeypatch.setattr(cases, "ROUTER", cases.ROUTER | {"hidden_size": 32})
    monkeypatch.setattr(bench_gather, "SEQUENCES", 3)
    monkeypatch.setattr(bench_layout, "TOKENS", 1024)
    monkeypatch.setattr(bench_opening, "MODEL", bench_opening.MODEL | {"num_layers": 2})
    monkeypatch.setattr(bench_decode, "TOKENS", 200)
    monkeypatch.setattr(bench_decode, "PROMPT", 50)
    bench_gather.rollout.cache_clear()
    bench_decode.sample.cache_clear()
    monkeypatch.setattr(cases, "STEP", cases.STEP | {"hidden_size": 32})
    natives = torch.topk, torch.Tensor.topk
    out = tmp_path / "bench.json"
    rows = bench.main(device="auto", pairs=2, out=out, force=False)

    release = tuple(map(int, megatron.core.__version__.split(".")[:2]))
    native = ["its API, served" if release < (0, 16) else "Megatron's own"]
    ways = {
        what: [row.way for row in rows if row.what == what]
        for what in (
            "router",
            "other top-k",
            "wrapper",
            "gather",
            "decode",
            "capture",
            "step",
            "open and close",
            "layout",
            "import",
        )
    }
    assert ways == {
        "router": ["live", "record", "replay", "record by Watch", "replay by Watch", *native],
        "other top-k": ["live", "in a block"],
        "wrapper": ["live", "off"],
        "gather": ["take, all 48", "take, cut to 12", "gather 12 of 48"],
        "decode": [
            "plain copy",
            "vLLM, array of uint8",
            "vLLM, base64 of .npy",
            "SGLang, base64 of int32",
            "base64 alone",
        ],
        "capture": ["routers alone", "captured"],
        "step": ["live", "record", "replay", *native],
        "open and close": ["one walk of modules()", "record", "replay", "pin_recompute"],
        "layout": ["forward", "layout read", "such lengths again"],
        "import": ["torch", "then npu_replay", "then its record"],
    }
    assert all(row.ratio == 1 and row.over == 0 for row in rows if row.way == "live")
    assert all(row.microseconds > 0 and row.ratio_low <= row.ratio <= row.ratio_high for row in rows)
    assert all(row.over_least <= row.over for row in rows)
    counted = [row for row in rows if row.what.startswith("host")]
    assert {row.waits for row in counted if row.way in ("live", "least record", "least replay")} == {0}
    # A CPU's own check at the forward's end.
    assert {row.waits for row in counted if row.way in ("record", "replay", "pin_recompute")} == {1}
    ends = [row.microseconds for row in rows if row.what == "import"]
    assert ends == sorted(ends), "each step ends after the one before it"

    printed = capfd.readouterr().out
    assert "record by Watch" in printed
    assert "3 sequences" in printed
    assert "385.0 a token" in printed
    assert "memory beside the answer" in printed
    assert "ms beyond torch: then npu_replay " in printed
    assert json.loads(out.read_text())["rows"][0]["way"] == "live"
    with pytest.raises(npu_replay.ReplayError, match=r"not overwritten.*--force"):
        bench.main(device="auto", pairs=2, out=out, force=False)
    assert (torch.topk, torch.Tensor.topk) == natives
    assert not guard.is_open
    bench_gather.rollout.cache_clear()
    bench_decode.sample.cache_clear()
