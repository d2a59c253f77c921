"""npu-replay smoke without any process group: its options, its exit codes for bad ones, and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from command_line import invoke
from npu_replay.compat.probe import _KNOWN as KNOWN
from npu_replay.compat.probe import Product
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.smoke import checks
from npu_replay.smoke import run as smoke
from npu_replay.smoke.options import Options
from npu_replay.smoke.report import FAIL, Report


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({"tp": 2, "pp": 2, "ep": 2}, 4),  # experts aren't cut: their two ranks are the tensor-parallel ones
        ({"tp": 2, "etp": 2, "ep": 2}, 4),
        ({"tp": 2, "cp": 2, "pp": 3, "ep": 8}, 24),
        ({"ep": 3, "cp": 2}, 6),
    ],
)
def test_a_split_knows_which_number_of_processes_it_wants(sizes: dict[str, int], multiple: int) -> None:
    assert Options(**sizes).multiple == multiple


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 3, "ep": 3}, {"pp": 3, "vp": 2}, {"ep": 64}, {"tp": 8, "cp": 4}]
)
def test_the_model_fits_its_split(sizes: dict[str, int]) -> None:
    split = Options(**sizes)
    assert split.experts % split.ep == split.experts % 4 == 0
    assert split.experts >= 8
    assert split.layers % (split.pp * split.vp) == 0
    assert split.layers // (split.pp * split.vp) >= 2  # the first is dense, and no stage is without a router
    assert split.micro_batches % split.pp == 0
    assert split.vocabulary % split.tp == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tp", "2", "--pp", "2"],
            "a multiple of 4 processes, and there are 3: torchrun --nproc-per-node 4",
        ),
        (["--tp", "2"], "a multiple of 2 processes, and there are 3"),  # more than enough, and no multiple
        (["--ep", "0"], "argument --ep: 0 is less than 1"),
        (["--patience", "0"], "argument --patience: 0 is less than 1"),
        (["--out", __file__], "the file is there already"),
    ],
)
def test_what_cant_be_run_exits_2(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = invoke("smoke", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())


def test_every_option_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(smoke, "main", lambda options: seen.append(options) or 0)
    arguments = [item for name in ("tp", "pp", "ep", "cp", "vp", "etp") for item in (f"--{name}", "3")]
    arguments += ["--recompute", "--device", "npu", "--json", "--out", "x.json", "--force"]
    arguments += ["--patience", "7"]
    for extra in ([], arguments):
        result = invoke("smoke", "--debug", *extra)
        assert result.exit_code == 0, result.output
    default, changed = map(vars, seen)
    assert default == vars(Options())
    assert [name for name in default if default[name] == changed[name]] == []


@pytest.mark.parametrize(
    ("broken", "instead", "words"),
    [
        ("import_adaptors", lambda: 1 / 0, "FAIL start rank 0: ZeroDivisionError: division by zero"),
        # without Megatron it says what doctor says
        ("probe.products", lambda: [Product(name, False) for name in KNOWN], "put Megatron-LM on PYTHONPATH"),
    ],
)
def test_a_start_that_fails_is_a_result_too(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    broken: str,
    instead: Any,
    words: str,
) -> None:
    monkeypatch.setattr(f"{smoke.__name__}.{broken}", instead)
    monkeypatch.setattr(smoke.dist, "is_initialized", lambda: False)  # the groups of other tests, too
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "smoke.json"
    assert smoke.main(Options(device="cpu", out=file)) == 1
    assert words in " ".join(capfd.readouterr().out.split())
    report = json.loads(file.read_text())
    assert [(row["feature"], row["result"]) for row in report["results"]] == [("start", FAIL)]


def test_what_adapts_megatron_is_imported_in_a_jobs_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported = mock.Mock()
    monkeypatch.setattr(smoke.importlib, "import_module", imported)
    for products, modules in (
        (["MegatronAdaptor"], ["megatron_adaptor"]),
        (["mindspeed"], ["mindspeed.megatron_adaptor"]),
        (["numpy"], []),
        (["mindspeed", "MegatronAdaptor"], ["megatron_adaptor", "mindspeed.megatron_adaptor"]),
    ):
        there = [Product(name, True, "", str(tmp_path)) for name in products]
        monkeypatch.setattr(smoke.probe, "products", lambda there=there: there)
        imported.reset_mock()
        smoke.import_adaptors()
        assert imported.call_args_list == [mock.call(module) for module in modules]
    arguments = sys.argv
    imported.side_effect = ModuleNotFoundError("No module named 'transformer_engine'")
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        smoke.import_adaptors()
    assert sys.argv is arguments


def test_nothing_tried_is_no_pass() -> None:
    assert not Report(Options(), 1).passed


def test_rows_that_show_too_few_experts_are_no_match() -> None:
    ids = torch.tensor([[[0, 1]], [[2, 3]]])
    whole, lacking = (
        RoutedExperts(ids=ids, layers=[0], num_experts=4, recorded=torch.tensor([True, kept]))
        for kept in (True, False)
    )
    assert checks._same([whole], [whole], "differ") == 2
    with pytest.raises(checks.Wrong, match="1 rows have no route, or show fewer experts"):
        checks._same([lacking], [whole], "differ")
