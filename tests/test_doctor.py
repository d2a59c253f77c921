"""npu-replay doctor: run as people run it, on machines that lack something or have something broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_replay import doctor, routers, self_test
from npu_replay.compat import probe
from npu_replay.compat.probe import Product
from npu_replay.doctor import diagnose
from npu_replay.self_test import Outcome
from npu_replay.timeline import Timeline

# Keeps a package from being found, wherever it is installed.
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


@dataclass(frozen=True)
class Run:
    code: int
    text: str


def run(*arguments: str, path: str = "") -> Run:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path, "COLUMNS": "250", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "npu_replay", "doctor", *arguments],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Run(done.returncode, done.stdout)


def row(text: str, name: str) -> str:
    """The state that the table gives for a capability, and why."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
    return " ".join(line.removeprefix(name).split())


# As people run it


@pytest.mark.megatron
def test_with_megatron_it_says_that_replay_works_and_exits_0() -> None:
    result = run(path=os.environ.get("PYTHONPATH", ""))
    assert result.code == 0
    assert row(result.text, "replay on Megatron-core").startswith("works")
    assert row(result.text, "CPU").startswith("works tried: recorded, replayed, recomputed")
    assert "Replay works here: on Megatron-core" in result.text


def test_without_any_framework_it_says_how_to_get_one_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        HIDE.format(hidden=("megatron", "transformers", "safetensors"))
    )
    result = run(path=str(tmp_path))
    assert result.code == 1
    assert row(result.text, "replay on Megatron-core") == "missing megatron-core is not installed"
    assert row(result.text, "CPU").startswith("works")
    assert "pip install 'npu-replay[files]'" in result.text
    assert "no framework whose routers are recognised" in result.text
    assert "put Megatron-LM on PYTHONPATH" in result.text


def test_a_half_installed_megatron_is_named_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    result = run("--json", path=str(tmp_path))
    found = json.loads(result.text)
    assert result.code == 1
    assert found["works"] is False
    assert found["faults"][0]["problem"].startswith("megatron-core is broken: half installed:")
    assert "PYTHONPATH" in found["faults"][0]["remedy"]
    assert [trial["problem"] for trial in found["self_test"]] == [""]


def test_a_torch_npu_that_does_not_import_breaks_neither_doctor_nor_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')")
    (tmp_path / "torch_npu" / "version.py").write_text("__version__ = '2.7.1'")
    result = run(path=str(tmp_path))
    assert result.code == 1
    assert row(result.text, "CPU").startswith("works")
    assert row(result.text, "NPU") == "broken ImportError: libhccl.so: cannot open"
    assert "- NPU: ImportError: libhccl.so: cannot open" in result.text
    assert "set_env.sh" in result.text


# In this process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Product]:
    """A machine with torch and a CPU; put the other products into it."""
    there: dict[str, Product] = {}
    monkeypatch.setattr(
        probe, "products", lambda: tuple(there.get(k.name, Product(k.name, False)) for k in probe._KNOWN)
    )
    monkeypatch.setattr(doctor, "_try_device", lambda device: Outcome(device, "", 0.1))
    return there


def problems(**options: bool) -> list[str]:
    return [fault.problem for fault in diagnose(**options).faults]


def test_one_framework_is_enough(machine: dict[str, Product]) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    assert problems() == []


def test_a_recompute_that_cannot_be_told_is_a_fault(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    monkeypatch.setattr("npu_replay.recompute.probe", lambda: "a name is gone")
    assert any("a name is gone" in problem for problem in problems())


def test_a_broken_extra_is_shown_and_is_no_fault(machine: dict[str, Product]) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    machine["matplotlib"] = Product("matplotlib", True, "3.11", "", "half installed: no __init__.py")
    assert problems() == []


def test_a_self_test_that_fails_is_a_fault(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    monkeypatch.setattr(self_test, "run", lambda device: Outcome(device, "NoEffect: none", 0.1))
    diagnosis = diagnose()
    assert [fault.problem for fault in diagnosis.faults] == ["CPU: NoEffect: none"]
    assert next(c for c in diagnosis.capabilities if c.name == "CPU").state == "broken"


def test_an_npu_is_tried_in_another_process(machine: dict[str, Product]) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    machine["torch_npu"] = Product("torch_npu", True, "2.7.1")
    diagnosis = diagnose()
    assert [trial.device for trial in diagnosis.trials] == ["cpu", "npu"]
    assert next(c for c in diagnosis.capabilities if c.name == "NPU").state == "works"


def test_a_framework_that_does_not_import_is_a_fault_where_it_is_asked(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["transformers"] = Product("transformers", True, "5.23.0")
    machine["megatron-core"] = Product("megatron-core", True, "0.12.1")

    def child(command: list[str]) -> tuple[str, str]:
        return ("", "No module named 'einops'") if "megatron" in command[-1] else ("imported", "")

    monkeypatch.setattr(doctor, "_child", child)
    assert problems() == []
    assert problems(imports=True) == ["megatron-core 0.12.1 doesn't import: No module named 'einops'"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('noise'); print('last')", ("last", "")),
        ("raise ValueError('why')", ("", "ValueError: why")),
        ("import os; os.kill(os.getpid(), 9)", ("", "the process was killed by signal 9")),
        ("raise SystemExit(3)", ("", "the process ended with status 3")),
        ("import time; time.sleep(60)", ("", "no answer within 1 s")),
    ],
)
def test_whatever_happens_to_a_child_is_told(
    code: str, outcome: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE", 1)
    assert doctor._child([sys.executable, "-S", "-c", code]) == outcome


# The self-test itself


def test_the_self_test_passes_and_leaves_nothing() -> None:
    before, state = routers.kinds(), torch.get_rng_state()
    assert self_test.run("cpu").problem == ""
    assert routers.kinds() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_the_self_test_notices_a_replay_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(self_test, "replay", Nothing)
    assert self_test.run("cpu").problem == "the routers didn't choose the experts that were replayed"


def test_the_self_test_notices_a_recompute_that_takes_another_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recomputed = Timeline.recomputed
    monkeypatch.setattr(Timeline, "recomputed", lambda *arguments: 1 - recomputed(*arguments))
    assert self_test.run("cpu").problem == "with recompute the gradients differ from those without"


def test_the_self_test_says_which_device_is_not_there() -> None:
    assert self_test.run("xpu" if not torch.xpu.is_available() else "mtia").problem.startswith(
        "torch finds no"
    )
