"""npu-replay doctor: run as people run it, on machines that lack something or have something broken."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import routers, tables
from npu_replay.compat import probe
from npu_replay.compat.probe import Product
from npu_replay.doctor import diagnose as doctor
from npu_replay.doctor import self_test
from npu_replay.doctor.diagnose import diagnose
from npu_replay.sessions.micro_batches import Timeline

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


def run(*arguments: str, path: str = "", **variables: str) -> Run:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": path, "COLUMNS": "250", "OMP_NUM_THREADS": "1"} | variables
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


@pytest.mark.slow
@pytest.mark.megatron
def test_with_megatron_it_says_that_replay_works_and_exits_0() -> None:
    result = run(path=os.environ.get("PYTHONPATH", ""))
    assert result.code == 0
    megatron = row(result.text, "replay on Megatron-core")
    assert megatron.startswith("works TopKRouter is recognised")
    assert megatron.endswith("; imports")
    assert row(result.text, "CPU").startswith("works tried: recorded, replayed, recomputed")
    assert "Replay works here: on Megatron-core" in result.text
    folder = Path(npu_replay.__file__).parent
    assert row(result.text, "npu_replay") in (
        f"{npu_replay.__version__} {folder}",
        f"{npu_replay.__version__} site-packages",
    )


def test_without_any_framework_it_says_how_to_get_one_and_exits_1(tmp_path: Path) -> None:
    hidden = ("megatron", "transformers", "matplotlib")
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    result = run(path=str(tmp_path))
    assert result.code == 1
    assert row(result.text, "replay on Megatron-core") == "missing megatron-core is not installed"
    assert row(result.text, "CPU").startswith("works")
    assert "pip install matplotlib" in result.text
    assert "no framework whose routers are recognised" in result.text
    assert result.text.count("put Megatron-LM on PYTHONPATH") == 1


@pytest.mark.slow
def test_the_states_stand_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = tables.as_text(diagnose().parts())
    columns = [line.index("works") for line in text.splitlines() if "  works  " in line]
    assert len(columns) > 1
    assert len(set(columns)) == 1


@pytest.mark.slow
def test_it_takes_its_options(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=("megatron",)))
    file = tmp_path / "found.json"
    result = run("--json", "--imports", "--out", str(file), path=str(tmp_path))
    found = json.loads(result.text)  # stdout has nothing else
    assert json.loads(file.read_text()) == found
    assert result.code == (0 if found["works"] else 1)
    assert any(one["why"].endswith("; imports") for one in found["capabilities"])


# With a Megatron that is broken


@pytest.fixture
def megatron_core(tmp_path: Path) -> Path:
    """A copy of the megatron.core that is here, to be broken."""
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    copy = tmp_path / "megatron" / "core"
    shutil.copytree(spec.submodule_search_locations[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def diagnosed(megatron_core: Path, **variables: str) -> Run:
    """What doctor says with this megatron.core before any other."""
    path = os.pathsep.join([str(megatron_core.parents[1]), os.environ.get("PYTHONPATH", "")])
    return run(path=path, COLUMNS="1000", **variables)


def assert_refused(result: Run) -> None:
    assert result.code == 1
    assert "Replay works here" not in result.text
    assert "Replay does not work here:" in result.text
    assert row(result.text, "Megatron's own replay").startswith("missing")


def append(source: Path, line: str) -> int:
    """Adds a line, and tells its number."""
    lines = [*source.read_text(encoding="utf-8").splitlines(), line]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.first_release
@pytest.mark.choice(every=2)
@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("transformer/moe/router.py", "import gone", "ModuleNotFoundError: No module named 'gone'"),
        ("__init__.py", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("transformer/moe/moe_utils.py", "def (", "SyntaxError: invalid syntax (moe_utils.py, line {})"),
    ],
)
def test_what_does_not_import_is_told(megatron_core: Path, name: str, line: str, error: str) -> None:
    number = append(megatron_core / name, line)
    error = error.format(number)
    result = diagnosed(megatron_core)
    assert_refused(result)
    state, product, _, says = row(result.text, "replay on Megatron-core").split(maxsplit=3)
    assert (state, product, says) == ("broken", "megatron-core", f"doesn't import: {error}")
    assert f"python -c 'import {MEGATRON}' has to work" in result.text


ROUTING = ("topk_softmax_with_capacity", "topk_routing_with_score_function")


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.first_release
def test_a_fork_whose_routing_has_another_name_is_told(megatron_core: Path) -> None:
    for source in megatron_core.rglob("*.py"):
        text = renamed = source.read_text(encoding="utf-8")
        for name in ROUTING:
            renamed = renamed.replace(name, f"forked_{name}")
        if renamed != text:
            source.write_text(renamed, encoding="utf-8")
    result = diagnosed(megatron_core)
    assert_refused(result)
    megatron = row(result.text, "replay on Megatron-core")
    assert megatron.startswith("broken megatron-core")
    assert "can't be replayed: functions of later Megatron-core releases: routing failed" in megatron
    assert "no function that routes is known" in megatron
    result = diagnosed(megatron_core, NPU_REPLAY_STRICT="0")
    assert result.code == 0


# In this process


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Product]:
    """A machine with torch, a CPU and transformers; put the other products into it."""
    there = {"transformers": Product("transformers", True, "5.23.0")}
    monkeypatch.setattr(
        probe, "products", lambda: tuple(there.get(name, Product(name, False)) for name in probe._KNOWN)
    )
    monkeypatch.setattr(doctor, "_try", lambda module, *arguments: "")
    return there


def problems(**options: bool) -> list[str]:
    return [fault.why for fault in diagnose(**options).faults]


def states() -> dict[str, str]:
    return {capability.name: capability.state for capability in diagnose().report.capabilities}


def test_one_framework_is_enough_and_a_broken_extra_is_no_fault(machine: dict[str, Product]) -> None:
    assert problems() == []
    machine["matplotlib"] = Product("matplotlib", False, problem="not to be looked up (OSError: gone)")
    assert problems() == []


@pytest.mark.usefixtures("machine")
def test_a_recompute_that_cannot_be_told_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_replay.sessions.backward.probe", lambda: "a name is gone")
    (fault,) = [fault for fault in diagnose().faults if fault.name == "recompute"]
    assert "a name is gone" in fault.why


@pytest.mark.usefixtures("machine")
def test_a_self_test_that_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "run", lambda device: "NoEffect: none")
    assert problems() == ["NoEffect: none"]
    assert states()["CPU"] == "broken"


def test_an_npu_is_tried_in_another_process(machine: dict[str, Product]) -> None:
    machine["torch_npu"] = Product("torch_npu", True, "2.7.1")
    assert [*diagnose().trials] == ["cpu", "npu"]
    assert states()["NPU"] == "works"


MEGATRON = "megatron.core.transformer.moe.router"
ADAPTOR = "mindspeed.megatron_adaptor"
EINOPS = "doesn't import: No module named 'einops'"


@pytest.fixture
def fails(machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], str]:
    """A machine with both frameworks; put into it which imports fail, and how."""
    machine["megatron-core"] = Product("megatron-core", True, "0.12.1")
    trials: dict[tuple[str, ...], str] = {}
    monkeypatch.setattr(doctor, "_try", lambda module, *arguments: trials.get(arguments, ""))
    return trials


def test_a_megatron_that_does_not_import_is_a_fault(fails: dict[tuple[str, ...], str]) -> None:
    assert problems() == []
    fails[MEGATRON,] = EINOPS
    assert problems() == ["megatron-core 0.12.1 doesn't import: No module named 'einops'"]
    found = states()
    assert found["replay on Megatron-core"] == "broken"
    assert found["replay on transformers"] == "works"
    for other in ("Megatron's own replay", "Megatron-core on the CPU"):
        assert found.get(other, "missing") == "missing"


def test_transformers_is_imported_where_it_is_asked(fails: dict[tuple[str, ...], str]) -> None:
    fails["transformers.models.qwen3_moe.modeling_qwen3_moe",] = EINOPS
    assert problems() == []
    assert problems(imports=True) == ["transformers 5.23.0 doesn't import: No module named 'einops'"]


def test_what_npu_replay_could_not_change_is_a_fault(fails: dict[tuple[str, ...], str]) -> None:
    fails[MEGATRON,] = "can't be replayed: flags failed: a name is gone"
    (fault,) = diagnose().faults
    assert fault.why == "megatron-core 0.12.1 can't be replayed: flags failed: a name is gone"
    assert "NPU_REPLAY_STRICT=0" in fault.remedy


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ([], []),
        ([(ADAPTOR, MEGATRON)], ["mindspeed 0.12.1 doesn't import: No module named 'einops'"]),
        (
            [(ADAPTOR, MEGATRON), (MEGATRON,)],
            ["megatron-core 0.12.1 doesn't import: No module named 'einops'"],
        ),
        ([(MEGATRON,)], []),  # MindSpeed lends what this Megatron lacks here
    ],
)
def test_megatron_is_imported_as_jobs_with_mindspeed_do_and_whose_fault_it_is_is_told(
    fails: dict[tuple[str, ...], str],
    machine: dict[str, Product],
    monkeypatch: pytest.MonkeyPatch,
    broken: list[tuple[str, ...]],
    fault: list[str],
) -> None:
    machine["mindspeed"] = Product("mindspeed", True, "0.12.1", "/nowhere")
    monkeypatch.setattr(
        "npu_replay.compat.mindspeed.features.find", lambda name: name
    )  # a source tree of Megatron-LM
    fails.update(dict.fromkeys(broken, EINOPS))
    assert problems() == fault


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('noise'); print('{\"problem\": \"it\"}')", "it"),
        ("print('noise'); print('{\"unknown\": 1}')", "the process printed '{\"unknown\": 1}'"),
        ("print([])", "the process printed '[]'"),
        ("raise ValueError('why')", "ValueError: why"),
        ("import os; os.kill(os.getpid(), 9)", "the process was killed by signal 9"),
        ("raise SystemExit(3)", "the process ended with status 3"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_whatever_happens_to_a_child_is_told(
    code: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_PATIENCE", 1 if "sleep" in code else 60)  # a busy machine starts slowly
    assert doctor._try("child") == problem


# The import itself


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ValueError('why\\nand more')", "doesn't import: ValueError: why"),
        ("import atexit, os; atexit.register(os.abort)", ""),
    ],
)
def test_an_import_is_tried_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, problem: str
) -> None:
    (tmp_path / "product.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._try(doctor.__name__, "json", "product") == problem
    assert "product" not in sys.modules


def test_modules_are_imported_in_their_order_without_arguments_and_up_to_the_first_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first.py").write_text(
        "import sys\nassert 'npu_replay' in sys.modules\nassert not sys.argv[1:]"
    )
    (tmp_path / "second.py").write_text(
        "import sys\nassert 'first' in sys.modules\nraise ValueError('second')"
    )
    (tmp_path / "third.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._try(doctor.__name__, "first", "second", "third") == "doesn't import: ValueError: second"


# The self-test itself


def test_the_self_test_passes_and_leaves_nothing() -> None:
    before, state = routers.kinds(), torch.get_rng_state()
    assert self_test.run("cpu") == ""
    assert routers.kinds() == before
    assert torch.equal(torch.get_rng_state(), state)


class Nothing(contextlib.nullcontext[None]):
    def __init__(self, *_: Any) -> None:
        super().__init__()


RECOMPUTED = Timeline.recomputed


@pytest.mark.parametrize(
    ("owner", "name", "broken", "problem"),
    [
        (self_test, "replay", Nothing, "the routers didn't choose the experts that were replayed"),
        (
            Timeline,
            "recomputed",
            lambda *arguments: 1 - RECOMPUTED(*arguments),
            "with recompute the gradients differ from those without",
        ),
    ],
    ids=["a replay without effect", "a recompute that takes another micro-batch"],
)
def test_the_self_test_notices(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, problem: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert self_test.run("cpu") == problem


def test_the_self_test_says_which_device_is_not_there() -> None:
    absent = "mtia" if torch.xpu.is_available() else "xpu"
    assert self_test.run(absent).startswith("torch finds no")
