"""npu-replay doctor, run as people run it on machines that lack something; report and uninstall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ascend_images
import npu_replay
from command_line import invoke
from npu_replay import routers
from npu_replay.compat import probe
from npu_replay.compat.patching import patches as patching
from npu_replay.compat.probe import Product
from npu_replay.doctor import diagnose as doctor
from npu_replay.doctor import report as reporting
from npu_replay.doctor import self_test
from npu_replay.sessions.timeline import Timeline
from zoo.toys import ToyModel, ToyRouter, tokens

MEGATRON = "megatron.core.transformer.moe.router"
ADAPTOR = "mindspeed.megatron_adaptor"


def run(command: str, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    """As people run it."""
    changes = {"PYTHONPATH": path, "COLUMNS": "1000", "OMP_NUM_THREADS": "1"}
    if command != "doctor":
        changes["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [sys.executable, "-m", "npu_replay", command, *arguments],
        env=os.environ | changes,
        text=True,
        capture_output=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def row(done: Any, name: str) -> str:
    """The state that the table gives for a capability, and why."""
    line = next(line for line in done.stdout.splitlines() if line.startswith(f"{name}  "))
    return " ".join(line.removeprefix(name).split())


def states(report: reporting.Report) -> dict[str, str]:
    return {capability.name: capability.state for capability in report.capabilities}


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


def test_without_any_framework_it_says_how_to_get_one_and_exits_1(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.clear()
    monkeypatch.setenv("COLUMNS", "1000")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert row(result, "replay on Megatron-core") == "missing megatron-core is not installed"
    assert row(result, "CPU").startswith("works")
    assert "pip install 'transformers>=5'" in result.stdout
    assert "no framework whose routers are recognised" in result.stdout
    assert result.stdout.count("put Megatron-LM on PYTHONPATH") == 1


def problems(**options: bool) -> list[str]:
    return [fault.why for fault in doctor.diagnose(**options).faults]


def test_one_framework_is_enough_and_a_broken_extra_is_no_fault(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["mbridge"] = Product("mbridge", False, problem="not to be looked up (OSError: gone)")
    machine["torch_npu"] = Product("torch_npu", True, "2.7.1")
    diagnosis = doctor.diagnose()
    assert diagnosis.faults == ()
    assert [*diagnosis.trials] == ["cpu", "npu"], "the NPU in another process"
    assert states(diagnosis.report)["NPU"] == "works"
    monkeypatch.setenv("COLUMNS", "1000")
    result = invoke("doctor")
    assert result.exit_code == 0
    verdict = "Replay works here: on transformers; tried with a small router, with recompute, on CPU and NPU."
    assert verdict in result.stdout
    assert row(result, "npu_replay").startswith(npu_replay.__version__)
    monkeypatch.setattr(self_test, "run", lambda device: "NoEffect: none")
    monkeypatch.setattr("npu_replay.seam.backward.probe", lambda: "a name is gone")
    diagnosis = doctor.diagnose()
    assert [fault.name for fault in diagnosis.faults] == ["recompute", "CPU"]
    assert "a name is gone" in diagnosis.faults[0].why
    assert (diagnosis.faults[1].why, states(diagnosis.report)["CPU"]) == ("NoEffect: none", "broken")
    result = invoke("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["works"]) == (1, False)


def test_a_capture_that_is_asked_for_and_cannot_work_is_a_fault(
    machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["vllm"] = Product("vllm", True, "0.18.0")
    machine["vllm-ascend"] = Product("vllm-ascend", True, "0.18.0rc1")
    assert problems() == []
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "on")
    monkeypatch.setenv("NPU_REPLAY_AUTOLOAD", "off")
    (fault,) = doctor.diagnose().faults
    assert (fault.name, fault.state) == ("capture on vllm-ascend", "broken")
    assert invoke("doctor").exit_code == 1


EINOPS = "doesn't import: No module named 'einops'"
MEGATRONS = "megatron-core 0.12.1 doesn't import: No module named 'einops'"


@pytest.fixture
def fails(machine: dict[str, Product], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], str]:
    """A machine with both frameworks; put into it which imports fail, and how."""
    machine["megatron-core"] = Product("megatron-core", True, "0.12.1")
    trials: dict[tuple[str, ...], str] = {}
    monkeypatch.setattr(doctor, "_try", lambda module, *arguments: trials.get(arguments, ""))
    return trials


def test_a_framework_that_does_not_import_is_a_fault(fails: dict[tuple[str, ...], str]) -> None:
    fails["transformers.models.qwen3_moe.modeling_qwen3_moe",] = EINOPS
    assert problems() == []
    assert problems(imports=True) == ["transformers 5.23.0 doesn't import: No module named 'einops'"]
    fails[MEGATRON,] = EINOPS
    assert problems() == [MEGATRONS]
    state_of = states(doctor.diagnose().report)
    assert (state_of["replay on Megatron-core"], state_of["replay on transformers"]) == ("broken", "works")
    for other in ("Megatron's own replay", "Megatron-core on the CPU"):
        assert state_of.get(other, "missing") == "missing"
    fails[MEGATRON,] = "can't be replayed: flags failed: a name is gone"
    (fault,) = doctor.diagnose().faults
    assert fault.why == "megatron-core 0.12.1 can't be replayed: flags failed: a name is gone"
    assert "NPU_REPLAY_STRICT=off" in fault.remedy


UNDER_ADAPTOR = "MegatronAdaptor 0.1.0 doesn't import: No module named 'einops'"
WITH_ADAPTOR = ("megatron_adaptor", MEGATRON)
WITH_BOTH = ("megatron_adaptor", ADAPTOR, MEGATRON)


@pytest.mark.parametrize(
    ("products", "broken", "faults", "lost"),
    [
        (("MegatronAdaptor",), [WITH_ADAPTOR], [UNDER_ADAPTOR], []),
        (("MegatronAdaptor",), [(MEGATRON,)], [], []),  # Megatron needs what MegatronAdaptor lends
        (("MegatronAdaptor",), [WITH_ADAPTOR, (MEGATRON,)], [MEGATRONS], ["replay under MegatronAdaptor"]),
        (("MegatronAdaptor", "mindspeed"), [WITH_BOTH], ["mindspeed 0.12.1 doesn't import"], []),
        (
            ("MegatronAdaptor", "mindspeed"),
            [WITH_BOTH, WITH_ADAPTOR],
            [UNDER_ADAPTOR],
            ["replay under MindSpeed"],
        ),
        (("MegatronAdaptor", "mindspeed"), [WITH_ADAPTOR, (MEGATRON,)], [], []),
        (("mindspeed",), [(ADAPTOR, MEGATRON)], ["mindspeed 0.12.1 doesn't import"], []),
        (("mindspeed",), [(ADAPTOR, MEGATRON), (MEGATRON,)], [MEGATRONS], []),
        (("mindspeed",), [(MEGATRON,)], [], []),  # MindSpeed lends what this Megatron lacks here
    ],
)
def test_whose_fault_it_is_shows_without_what_adapts_megatron(
    fails: dict[tuple[str, ...], str],
    machine: dict[str, Product],
    monkeypatch: pytest.MonkeyPatch,
    products: tuple[str, ...],
    broken: list[tuple[str, ...]],
    faults: list[str],
    lost: list[str],
) -> None:
    # a source tree of Megatron-LM
    monkeypatch.setattr("npu_replay.compat.mindspeed.adaptors.find", lambda name: name)
    for name in products:
        machine[name] = Product(name, True, "0.1.0" if name == "MegatronAdaptor" else "0.12.1", "/nowhere")
    fails.update(dict.fromkeys(broken, EINOPS))
    diagnosis = doctor.diagnose()
    for fault, why in zip(diagnosis.faults, faults, strict=True):
        assert fault.why.startswith(why)
    assert [name for name in lost if states(diagnosis.report)[name] != "missing"] == []


@pytest.mark.slow
@pytest.mark.megatron
def test_a_simulated_image_passes_smoke_and_lacks_a_device_alone(tmp_path: Path) -> None:
    folder = Path(find_spec("megatron.core").submodule_search_locations[0])  # type: ignore[index,union-attr]
    has_own_replay = (folder / "transformer/moe/router_replay.py").is_file()  # from 0.16 on
    tag = "slime-ascend 0.3.0" if has_own_replay else "verl-8.5.0-910b-ubuntu22.04-py3.11-v0.7.1"
    path = str(ascend_images.make(ascend_images.image(tag), tmp_path, megatron=folder.parents[1]))
    result = run("doctor", "--out", str(tmp_path / "found.json"), path=path)
    faults = json.loads((tmp_path / "found.json").read_text())["faults"]
    assert [fault["name"] for fault in faults] == ["NPU"], result.stdout
    under = "replay under MegatronAdaptor" if has_own_replay else "replay under MindSpeed"
    assert row(result, under).startswith("works")
    assert row(result, "replay on Megatron-core").endswith("; imports")
    smoke = run("smoke", "--device", "cpu", "--recompute", path=path)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    assert ("MegatronAdaptor 0.1.0" in smoke.stdout) == has_own_replay


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('noise'); print('{\"problem\": \"it\"}')", "it"),
        ("print('noise'); print('{\"unknown\": 1}')", "the process printed '{\"unknown\": 1}'"),
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


@pytest.mark.slow
def test_modules_are_imported_in_their_order_in_another_process_up_to_the_first_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = "import atexit, os; atexit.register(os.abort)\n"  # at the end is no fault of an import
    (tmp_path / "first.py").write_text(
        f"{crashes}import sys\nassert 'npu_replay' in sys.modules\nassert not sys.argv[1:]"
    )
    (tmp_path / "second.py").write_text(
        "import sys\nassert 'first' in sys.modules\nraise ValueError('second\\nand more')"
    )
    (tmp_path / "third.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._try(doctor.__name__, "first", "second", "third") == "doesn't import: ValueError: second"
    assert "first" not in sys.modules


# The self-test


def test_the_self_test_passes_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = routers.kinds()
    state = torch.get_rng_state()
    assert self_test.run("cpu") == ""
    assert caplog.messages == []
    assert routers.kinds() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert self_test.run("mtia" if torch.xpu.is_available() else "xpu").startswith("torch finds no")


RECOMPUTED = Timeline.recomputed


def takes_another(timeline: Timeline, *arguments: Any) -> Any:
    own = RECOMPUTED(timeline, *arguments)
    return next(forward for _, forward in timeline.ends if forward is not own)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "problem"),
    [
        (
            self_test,
            "replay",
            lambda *_, **__: nullcontext(),
            "the routers didn't choose the experts that were replayed",
        ),
        (Timeline, "recomputed", takes_another, "with recompute the gradients differ from those without"),
    ],
)
def test_the_self_test_notices(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, problem: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert self_test.run("cpu") == problem


# npu_replay.report and npu_replay.uninstall


@pytest.fixture
def model(toy_routers: None) -> ToyModel:
    return ToyModel(ToyRouter(layer=3), ToyRouter(layer=4))


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[patching.Patches]:
    """The only changes: a test before may have imported Megatron, and its shims are on."""
    with monkeypatch.context() as patched:
        patched.setattr(patching, "_groups", [])
        group = patching.Patches("a test runs")
        yield group
        group.undo()
        npu_replay.install()


def test_report_holds_the_facts_and_changes_nothing(patches: patching.Patches, model: ToyModel) -> None:
    report = npu_replay.report()
    assert report.version == npu_replay.__version__
    assert (report.torch.version, report.torch.recompute_problem) == (torch.__version__, "")
    assert set(report.router_kinds) >= {"megatron-core", "transformers"}
    assert (report.open_sessions, report.patches) == ((), ())
    assert states(report)["recompute"] == states(report)["CPU"] == "works"
    with npu_replay.record(model):
        model(tokens())
        assert "record on layers 3, 4" in str(npu_replay.report())
    assert npu_replay.report().open_sessions == ()


@pytest.mark.parametrize(
    ("accelerator", "torch_npu", "cuda", "npu", "why"),
    [
        ("cuda", Product("torch_npu", False), "works", "missing", "not installed"),
        (
            "cuda",
            Product("torch_npu", True, "2.7.1", "", "half installed"),
            "works",
            "broken",
            "half installed",
        ),
        ("npu", Product("torch_npu", True, "2.7.1"), "missing", "works", "8 devices"),
        # never imported, so not known
        ("", Product("torch_npu", True, "2.7.1"), "missing", "missing", "no device of it is in this process"),
        (
            "",
            Product("torch_npu", True, "2.7.1", "", "half installed"),
            "missing",
            "broken",
            "half installed",
        ),
    ],
)
def test_devices_are_told_without_importing_torch_npu(
    machine: dict[str, Product],
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    torch_npu: Product,
    cuda: str,
    npu: str,
    why: str,
) -> None:
    machine |= {"torch_npu": torch_npu, "megatron-core": Product("megatron-core", True)}
    monkeypatch.setattr(reporting.torch_npu, "accelerator", lambda: (accelerator, 8))
    report = npu_replay.report()
    shown = states(report)
    assert (shown["CUDA"], shown["NPU"]) == (cuda, npu)
    assert why in next(capability.why for capability in report.capabilities if capability.name == "NPU")
    assert ("Megatron-core on the CPU" in shown) == (accelerator != "cuda")


def test_uninstall_undoes_every_patch_and_leaves_what_somebody_else_has_replaced(
    patches: patching.Patches,
) -> None:
    owner = SimpleNamespace(value=1, other=1)
    for name in ("value", "other", "new"):
        patches.set(owner, name, 2, "because")
    owner.value = 3
    npu_replay.uninstall()
    npu_replay.uninstall()
    assert vars(owner) == {"value": 3, "other": 1}
    assert not patching.is_on(), "what a product's objects hold asks this"
    assert npu_replay.report().patches == ()


def test_uninstall_inside_a_block_is_refused_before_anything_is_undone(
    model: ToyModel, patches: patching.Patches
) -> None:
    owner = SimpleNamespace(value=1)
    patches.set(owner, "value", 2, "because")
    with npu_replay.record(model):
        model(tokens())
        with pytest.raises(npu_replay.ReplayError, match="got record on layers 3, 4"):
            npu_replay.uninstall()
        assert owner.value == 2
    npu_replay.uninstall()
    assert owner.value == 1
