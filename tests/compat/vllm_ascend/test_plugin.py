"""When the plug-in acts, and what it says where it doesn't. What it captures: tests/on_vllm_ascend."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import sys
import types
from types import ModuleType, SimpleNamespace

import pytest

import npu_replay
from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Product
from npu_replay.compat.vllm import engine_arguments
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.errors import ReplayError

V1 = "vllm_ascend.worker.model_runner_v1"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The releases that are found here; a test changes them."""
    found = {"vllm-ascend": "0.23.0", "vllm": "0.23.0"}
    monkeypatch.setattr(probe, "installed", lambda name: found.get(name, ""))
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")  # changed, and so put back
    yield found
    npu_replay.uninstall()
    monkeypatch.undo()  # else install() would find none of the products that are really here
    npu_replay.install()


class Runner:
    """As much of a model runner as is touched before there is a model."""

    def __init__(self, vllm_config: object, device: str = "npu") -> None:
        self.vllm_config = vllm_config

    def init_routed_experts_capturer(self) -> None: ...


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = types.ModuleType(V1)
    module.NPUModelRunner = type("NPUModelRunner", (Runner,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, V1, module)
    return module


def config(*, asks: bool = True, **parallel: object) -> SimpleNamespace:
    additional = parallel.pop("additional_config", {})
    transfer = parallel.pop("kv_transfer_config", None)
    text = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    model = SimpleNamespace(enable_return_routed_experts=asks, hf_text_config=text, enforce_eager=False)
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1} | parallel),
        scheduler_config=SimpleNamespace(async_scheduling=parallel.pop("async_scheduling", False)),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        additional_config=additional,
        kv_transfer_config=transfer,
    )


def test_nothing_is_touched_unless_it_is_switched_on(
    installed: dict[str, str], runners: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("NPU_REPLAY_VLLM_ASCEND", "0"), ("NPU_REPLAY_DISABLE", "1")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            plugin.register()
            assert "__init__" not in vars(runners.NPUModelRunner)
            assert not import_hook._waiting.get(V1)


def test_workers_of_ray_are_told(
    installed: dict[str, str], runners: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given the variables that this one names; vLLM's own reading of it: tests/on_vllm_ascend."""
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE, ")
    for _ in range(2):
        plugin.register()
    told = os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"]
    assert told.split(",") == ["MINE", "NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"]
    npu_replay.uninstall()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "MINE, "
    monkeypatch.delenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")
    plugin.register()
    npu_replay.uninstall()
    assert "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY" not in os.environ


def test_without_strict_a_capture_that_cannot_be_attached_leaves_the_engine_as_released(
    installed: dict[str, str],
    runners: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(runner: object) -> None:
        raise ReplayError("somebody else has replaced this function")

    monkeypatch.setattr(plugin, "attach", fails)
    plugin.register()
    runner = runners.NPUModelRunner(config())
    with pytest.raises(ReplayError, match="somebody else"):
        runner.init_routed_experts_capturer()
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    runner.init_routed_experts_capturer()
    assert "somebody else has replaced this function" in caplog.text
    assert "The engine runs as released" in caplog.text
    assert "init_routed_experts_capturer" not in vars(runners.NPUModelRunner)


def test_a_runner_that_knows_no_routes_is_refused(
    installed: dict[str, str], runners: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model Runner V2 to 0.26."""
    monkeypatch.delattr(Runner, "init_routed_experts_capturer")
    plugin.register()
    assert not import_hook._failures
    with pytest.raises(ReplayError, match="this model runner knows no routes"):
        runners.NPUModelRunner(config())


def test_a_runner_that_cannot_be_guarded_ends_the_start(
    installed: dict[str, str], runners: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody opens a block in a worker, where such a failure would be said: it would run as released."""
    monkeypatch.delattr(runners, "NPUModelRunner")
    with pytest.raises(ReplayError, match="capture of routed experts failed: AttributeError"):
        plugin.register()
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    plugin.register()


class Executor:
    """As much of vLLM's as 0.18 to 0.30 have; `answers` are its workers', or what asking them raises."""

    def __init__(self, answers: object, asks: bool = True) -> None:
        self.vllm_config, self.answers, self.asked = config(asks=asks), answers, 0

    def initialize_from_config(self, kv_cache_configs: list[object]) -> str:
        return f"{len(kv_cache_configs)} caches"

    def collective_rpc(self, method: object) -> object:
        self.asked += 1
        assert pickle.loads(pickle.dumps(method)) is plugin.captures, "other nodes find it by its name"
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> type[Executor]:
    module = types.ModuleType("vllm.v1.executor.abstract")
    module.Executor = type("Executor", (Executor,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Executor  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([True, False, True, False], "got none on worker 1, 3 of 4"),
        (ModuleNotFoundError("No module named 'npu_replay'"), "got ModuleNotFoundError: No module named"),
    ],
)
def test_an_engine_with_a_worker_that_does_not_capture_ends(
    installed: dict[str, str],
    runners: ModuleType,
    executors: type[Executor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: object,
    says: str,
) -> None:
    """As on a node where npu_replay isn't installed: its rows would be zeros."""
    plugin.register()
    with pytest.raises(ReplayError, match=f"not every worker of this engine captures.*{says}"):
        executors(answers).initialize_from_config([1])
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    assert executors(answers).initialize_from_config([1]) == "1 caches"
    assert says in caplog.text


def test_workers_are_asked_once_where_routes_are_wanted(
    installed: dict[str, str], runners: ModuleType, executors: type[Executor]
) -> None:
    plugin.register()
    made = [executors([True, True]), executors([False], asks=False)]
    assert [one.initialize_from_config([]) for one in made] == ["0 caches"] * 2
    assert [one.asked for one in made] == [1, 0]
    npu_replay.uninstall()
    assert "initialize_from_config" not in vars(executors)


def test_uninstall_takes_everything_back(installed: dict[str, str], runners: ModuleType) -> None:
    plugin.register()
    plugin.register()
    assert {"__init__", "init_routed_experts_capturer"} <= vars(runners.NPUModelRunner).keys()
    npu_replay.uninstall()
    assert vars(runners.NPUModelRunner).keys().isdisjoint({"__init__", "init_routed_experts_capturer"})


@pytest.mark.parametrize(
    ("ascend", "vllm", "says"),
    [
        ("0.31.0", "0.31.0", "a release that it doesn't know"),
        ("0.17.0rc1", "0.17.0", "a release that it doesn't know"),
        ("0.21.0rc1", "0.21.0", "0.21.0rc1, which returns no routes"),
        ("0.23.0", "0.24.0", "beside vLLM 0.24.0"),
        ("0.23.1.dev4+g1234567", "0.31.0", "captures nothing on vllm-ascend 0.23.1.dev4"),
    ],
)
def test_an_unknown_release_ends_the_start(
    installed: dict[str, str],
    runners: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ascend: str,
    vllm: str,
    says: str,
) -> None:
    installed.update({"vllm-ascend": ascend, "vllm": vllm})
    with pytest.raises(ReplayError, match=says):
        plugin.register()
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    plugin.register()
    assert "The engine runs as released" in caplog.text
    assert "__init__" not in vars(runners.NPUModelRunner)


@pytest.mark.parametrize(
    ("ascend", "vllm"),
    [
        ("0.18.0", "0.18.0"),
        ("0.23.0.post1", "0.23.0"),
        ("0.30.0rc2", "0.30.0"),
        ("0.17.1.dev9+g5487946", "0.18.0"),
    ],
)
def test_a_known_release_is_guarded(
    installed: dict[str, str], runners: ModuleType, ascend: str, vllm: str
) -> None:
    installed.update({"vllm-ascend": ascend, "vllm": vllm})
    plugin.register()
    assert "__init__" in vars(runners.NPUModelRunner)


def test_without_vllm_ascend_one_line_says_so(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["vllm-ascend"] = ""
    plugin.register()
    assert "there is no vllm-ascend here: nothing is changed" in caplog.text


def test_an_engine_that_is_not_asked_for_routes_starts_and_says_so(
    installed: dict[str, str], runners: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    made = config(asks=False, pipeline_parallel_size=2)
    assert runners.NPUModelRunner(made, "npu").vllm_config is made
    assert "but not enable_return_routed_experts: no routes are captured" in caplog.text


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"enable_dbo": True}, "two half batches"),
        ({"kv_transfer_config": "a connector"}, "kv_transfer_config"),
        ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "under xlite"),
        ({"additional_config": {"enable_force_eplb": True}}, "other experts than those that run"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_ends_the_start_before_weights_are_loaded(
    installed: dict[str, str],
    runners: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    planned: dict[str, object],
    says: str,
) -> None:
    plugin.register()
    with pytest.raises(ReplayError, match=says):
        runners.NPUModelRunner(config(**planned), "npu")
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    runner = runners.NPUModelRunner(config(**planned), "npu")
    runner.init_routed_experts_capturer()
    assert caplog.text.count("The engine runs as released") == 2


@pytest.mark.parametrize("release", ["0.18.0", "0.20.2rc1"])
def test_a_hybrid_model_is_refused_where_vllm_keeps_too_few_slots(
    installed: dict[str, str], runners: ModuleType, release: str
) -> None:
    installed.update({"vllm-ascend": release, "vllm": release.removesuffix("rc1")})
    plugin.register()
    made = config()
    made.model_config.hf_text_config["layer_types"] = ["linear_attention", "full_attention"]
    with pytest.raises(ReplayError, match="captures no model with linear attention"):
        runners.NPUModelRunner(made)


def test_engine_arguments_lift_what_the_plug_in_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    planned = {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ReplayError, match="captures no quantized experts"):
        engine_arguments("0.23.0", vllm_ascend="0.23.0", quantization="ascend", planned=planned, soc="A3")
    made = engine_arguments(
        "0.23.0", vllm_ascend="0.23.0", quantization="ascend", planned=planned, soc="A3", capture=True
    )
    assert made.environment == {"NPU_REPLAY_VLLM_ASCEND": "1"}
    assert (
        engine_arguments("0.18.0", vllm_ascend="0.18.0", capture=True).arguments["async_scheduling"] is False
    )


MTP = {"speculative_config": {"method": "mtp"}}


@pytest.mark.parametrize(
    ("version", "planned", "says"),
    [
        ("0.18.0", {"data_parallel_size": 2, "enable_expert_parallel": True}, "data_parallel_size"),
        ("0.18.0", MTP, "speculative_config"),
        ("0.23.0", MTP, "speculative_config"),
    ],
    ids=str,
)
def test_engine_arguments_lift_what_the_plug_in_mends_of_vllms_own(
    version: str, planned: dict[str, object], says: str
) -> None:
    with pytest.raises(ReplayError, match=says):
        engine_arguments(version, vllm_ascend=version, planned=planned)
    assert engine_arguments(version, vllm_ascend=version, planned=planned, capture=True)


@pytest.mark.parametrize("build", ["0.17.1.dev9+g5487946", "0.1.dev1+g5487946"])
@pytest.mark.parametrize("version", ["0.18.0", "0.23.0"])
def test_a_build_that_images_carry_goes_by_its_vllm(version: str, build: str) -> None:
    made = engine_arguments(version, vllm_ascend=build, capture=True)
    released = engine_arguments(version, vllm_ascend=version, capture=True)
    assert made == released


def test_engine_arguments_refuse_two_releases_that_are_no_pair() -> None:
    with pytest.raises(ReplayError, match=r"vllm-ascend 0\.23\.0 beside vLLM 0\.24\.0"):
        engine_arguments("0.24.0", vllm_ascend="0.23.0", capture=True)


@pytest.mark.parametrize(
    ("filter_", "given"),
    [("", "npu_replay"), ("ascend,mine", "ascend,mine,npu_replay"), ("npu_replay,mine", None), (None, None)],
)
def test_engine_arguments_let_the_plug_in_pass_a_filter(
    monkeypatch: pytest.MonkeyPatch, filter_: str | None, given: str | None
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if filter_ is not None:
        monkeypatch.setenv("VLLM_PLUGINS", filter_)
    made = engine_arguments("0.23.0", vllm_ascend="0.23.0", capture=True)
    assert made.environment.get("VLLM_PLUGINS") == given


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "under xlite"),
        ({"enable_dbo": True}, "two half batches"),
        (
            {"compilation_config": {"pass_config": {"enable_sp": True}}, "tensor_parallel_size": 2},
            "a compiler's pass",
        ),
    ],
    ids=str,
)
def test_engine_arguments_refuse_what_the_plug_in_would(planned: dict[str, object], says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        engine_arguments("0.23.0", vllm_ascend="0.23.0", planned=planned, capture=True)


def test_a_capture_is_for_vllm_ascend_alone() -> None:
    with pytest.raises(ReplayError, match="npu_replay captures there alone"):
        engine_arguments("0.23.0", capture=True)


def test_the_entry_point_leads_to_the_plug_in() -> None:
    (found,) = importlib.metadata.entry_points(group=plugin.GROUP, name=plugin.NAME)
    assert found.load() is plugin.register


def test_doctor_says_what_keeps_it_from_capturing(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend, vllm = Product("vllm-ascend", True, "0.23.0", "here"), Product("vllm", True, "0.23.0", "here")
    found = plugin.capability(ascend, vllm)
    assert (found.state, "vllm-ascend 0.23.0 beside vLLM 0.23.0" in found.why) == ("works", True)
    monkeypatch.setenv("VLLM_PLUGINS", "ascend, other")
    assert plugin.capability(ascend, vllm).why == "VLLM_PLUGINS=ascend, other leaves npu_replay out"
    assert plugin.left_out() is not None
    monkeypatch.setenv("VLLM_PLUGINS", "ascend, npu_replay")
    assert "leaves npu_replay out" in str(plugin.left_out()), "vLLM looks for it with the space"
    monkeypatch.setenv("VLLM_PLUGINS", "ascend,npu_replay")
    assert plugin.left_out() is None
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert "isn't installed as a distribution" in plugin.capability(ascend, vllm).why
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "0")
    assert "it is off" in plugin.capability(ascend, vllm).why
    assert plugin.left_out() is None
    monkeypatch.setenv("NPU_REPLAY_DISABLE", "1")
    found = plugin.capability(ascend, vllm)
    assert ("NPU_REPLAY_DISABLE=1" in found.why, found.remedy) == (True, "")
    unknown = Product("vllm-ascend", True, "0.31.0", "here")
    assert plugin.capability(unknown, vllm).state == "missing"
