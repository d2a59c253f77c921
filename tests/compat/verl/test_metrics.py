"""compat.verl.metrics: the line that replay is on, which an operator has to see, and the figures."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from npu_replay.compat import probe
from npu_replay.compat.probe import Product
from npu_replay.compat.verl.metrics import COUNTED, announce, figures, summary

SUMS = {"routers": 4, "replayed": 4, "ranks": 1, "routed": 8, "rows": 8}


@pytest.mark.parametrize(
    ("source", "imported", "stack"),
    [
        ("", ["mindspeed"], "Megatron 0.18.0, MindSpeed 0.12.1"),
        (
            "import megatron_adaptor\n",
            ["mindspeed", "megatron_adaptor"],
            "Megatron 0.18.0, MindSpeed core_r0.17.0 or later, MegatronAdaptor 0.1.0",
        ),
        ("import megatron_adaptor\n", ["megatron_adaptor"], "Megatron 0.18.0, MegatronAdaptor 0.1.0"),
        ("import megatron_adaptor\n", [], "Megatron 0.18.0"),
    ],
)
def test_the_line_names_what_this_process_has_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, imported: list[str], stack: str
) -> None:
    (tmp_path / "__init__.py").write_text(source, encoding="utf-8")
    products = (
        Product("megatron-core", True, "0.18.0"),
        Product("mindspeed", True, "0.12.1", str(tmp_path)),
        Product("MegatronAdaptor", True, "0.1.0"),
    )
    monkeypatch.setattr(probe, "products", lambda: products)
    for name in ("mindspeed", "megatron_adaptor", "megatron.core.parallel_state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in imported:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    line = summary("R3", SUMS)
    assert line == f"R3: 4 routers, 4 replayed, 100% of rows had a route, 1 rank ({stack})"


def test_figures_are_of_all_ranks_and_left_out_where_nothing_was_counted() -> None:
    counted = dict.fromkeys(COUNTED, 0) | SUMS | {"ranks": 2, "microseconds": 3_000_000, "bytes": 5_000_000}
    always = {"rows_without_route": 0.0, "bad_samples": 0.0, "seconds": 1.5, "megabytes": 2.5}
    assert figures(counted) == {f"npu_replay/{name}": value for name, value in always.items()}
    compared = {"compared": 4, "differing": 1, "given": 8, "shared": 4, "chosen": 10, "dropped": 2}
    more = {"live_mismatch": 0.25, "overlap": 0.5, "capacity_dropped": 0.2}
    assert figures(counted | compared) == {
        f"npu_replay/{name}": value for name, value in (always | more).items()
    }


QUIET = logging.StreamHandler(sys.stderr)
QUIET.setLevel(logging.WARNING)
"""It shows no line at INFO."""


@pytest.mark.parametrize(
    ("handlers", "format_", "before"),
    [([], None, ""), ([], "%(name)s %(message)s", "npu_replay.job "), ([QUIET], None, "")],
    ids=["nothing", "warnings alone are shown", "a handler for warnings alone"],
)
def test_the_line_for_the_operator_is_seen_once_whatever_logging_is_set_up(
    handlers: list[logging.Handler],
    format_: str | None,
    before: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.NOTSET, "npu_replay.job")  # until the test ends
    monkeypatch.setattr(logging.root, "handlers", list(handlers))
    if format_ is not None:
        logging.basicConfig(level=logging.WARNING, format=format_)
    announce("one")
    announce("two")
    assert capsys.readouterr().err.splitlines() == [f"{before}[npu_replay] {line}" for line in ("one", "two")]
