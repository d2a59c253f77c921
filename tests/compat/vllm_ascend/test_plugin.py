"""When the plug-in acts, what it says where it doesn't, and what it looks for in a worker, on stand-ins:
whose functions, and which layers. What it captures: tests/on_vllm_ascend.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook
from npu_replay.compat.probe import Product
from npu_replay.compat.vllm import engine_arguments
from npu_replay.compat.vllm_ascend import parts, plugin
from npu_replay.compat.vllm_ascend.capture_points import layers, refuse_foreign, selectors
from npu_replay.errors import ReplayError

V1 = "vllm_ascend.worker.model_runner_v1"
EXECUTOR = "vllm.v1.executor.abstract"
COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
RELEASED = "The engine runs as released"


class Runner:
    """As much of a model runner as is touched before there is a model."""

    def __init__(self, vllm_config: object, device: str = "npu") -> None:
        self.vllm_config = vllm_config

    def init_routed_experts_capturer(self) -> None: ...


class Executor:
    """As much of vLLM's as 0.18 to 0.30 have; `answers` are its workers', or what asking them raises."""

    def __init__(self, answers: object, asks: bool = True) -> None:
        self.vllm_config = config(asks=asks)
        self.answers = answers
        self.asked = 0

    def initialize_from_config(self, kv_cache_configs: list[object]) -> str:
        return f"{len(kv_cache_configs)} caches"

    def collective_rpc(self, method: object) -> object:
        self.asked += 1
        assert pickle.loads(pickle.dumps(method)) is plugin.captures, "other nodes find it by its name"
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


class Worker:
    """The releases that are found here, vLLM's classes, and what a test changes and reads."""

    def __init__(self, env: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
        self.env = env
        self.log = log
        self.releases = {"vllm-ascend": "0.23.0", "vllm": "0.23.0"}
        self.runner: Any = type("NPUModelRunner", (Runner,), {})
        self.executor: Any = type("Executor", (Executor,), {})
        for module, kind in ((V1, self.runner), (EXECUTOR, self.executor)):
            env.setitem(sys.modules, module, ModuleType(module))
            setattr(sys.modules[module], kind.__name__, kind)

    def refuses(self, what: Any, *arguments: object, says: str) -> Any:
        """What it returns without strict; with it, an error."""
        with pytest.raises(ReplayError, match=says):
            what(*arguments)
        self.env.setenv("NPU_REPLAY_STRICT", "0")
        return what(*arguments)


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Worker]:
    made = Worker(monkeypatch, caplog)
    monkeypatch.setattr(probe, "installed", lambda name: made.releases.get(name, ""))
    # What its classes lack: tests/on_vllm_ascend, on the real ones.
    monkeypatch.setattr(parts, "check", lambda release: None)
    monkeypatch.setenv("NPU_REPLAY_VLLM_ASCEND", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv(COPIED, "")  # changed, and so put back
    yield made
    npu_replay.uninstall()
    monkeypatch.undo()  # else install() would find none of the products that are really here
    npu_replay.install()


def config(
    *,
    asks: bool = True,
    additional_config: Any = MappingProxyType({}),
    kv_transfer_config: object = None,
    speculative_config: object = None,
    **parallel: object,
) -> SimpleNamespace:
    text = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    model = SimpleNamespace(enable_return_routed_experts=asks, hf_text_config=text, enforce_eager=False)
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1} | parallel),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        additional_config=dict(additional_config),
        kv_transfer_config=kv_transfer_config,
        speculative_config=speculative_config,
    )


def test_a_runner_is_guarded_until_uninstall_where_it_is_switched_on(worker: Worker) -> None:
    (entry,) = importlib.metadata.entry_points(group=plugin.GROUP, name=plugin.NAME)
    register = entry.load()
    assert register.__module__ == "npu_replay_autoload.vllm"
    for name, value in (("NPU_REPLAY_VLLM_ASCEND", "0"), ("NPU_REPLAY_DISABLE", "1")):
        with worker.env.context() as patched:
            patched.setenv(name, value)
            register()
            assert "__init__" not in vars(worker.runner)
            assert not import_hook._waiting.get(V1)
    worker.releases["vllm-ascend"] = ""
    register()
    assert "there is no vllm-ascend here: nothing is changed" in worker.log.text
    for release in ("0.23.0", "0.17.1.dev9+g5487946"):  # a build that images carry goes by its vLLM
        worker.releases["vllm-ascend"] = release
        for _ in range(2):
            register()
        changed = {"__init__", "init_routed_experts_capturer"}
        assert changed <= vars(worker.runner).keys()
        npu_replay.uninstall()
        assert changed.isdisjoint(vars(worker.runner))


def test_workers_of_ray_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given the variables that this one names; vLLM's own reading of it: tests/on_vllm_ascend."""
    monkeypatch.setenv(COPIED, "MINE, ")
    for _ in range(2):
        plugin.register()
    assert os.environ[COPIED].split(",") == ["MINE", "NPU_REPLAY_VLLM_ASCEND", "NPU_REPLAY_STRICT"]
    monkeypatch.delenv(COPIED)
    plugin.register()
    assert os.environ[COPIED] == "NPU_REPLAY_VLLM_ASCEND,NPU_REPLAY_STRICT"


def test_without_strict_a_capture_that_cannot_be_attached_leaves_the_engine_as_released(
    worker: Worker,
) -> None:
    def fails(runner: object) -> None:
        raise ReplayError("somebody else has replaced this function")

    worker.env.setattr(plugin, "attach", fails)
    plugin.register()
    worker.refuses(worker.runner(config()).init_routed_experts_capturer, says="somebody else")
    assert "somebody else has replaced this function" in worker.log.text
    assert RELEASED in worker.log.text
    assert "init_routed_experts_capturer" not in vars(worker.runner)


def test_a_runner_that_knows_no_routes_is_refused(worker: Worker) -> None:
    """Model Runner V2 to 0.26."""
    worker.env.delattr(Runner, "init_routed_experts_capturer")
    plugin.register()
    assert not import_hook._failures
    with pytest.raises(ReplayError, match="this model runner knows no routes"):
        worker.runner(config())


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([True, False, True, False], "got none on worker 1, 3 of 4"),
        (ModuleNotFoundError("No module named 'npu_replay'"), "got ModuleNotFoundError: No module named"),
    ],
)
def test_an_engine_with_a_worker_that_does_not_capture_ends(
    worker: Worker, answers: object, says: str
) -> None:
    """As on a node where npu_replay isn't installed: its rows would be zeros. Asked where routes are."""
    plugin.register()
    made = [worker.executor([True, True]), worker.executor([False], asks=False)]
    assert [executor.initialize_from_config([]) for executor in made] == ["0 caches"] * 2
    assert [executor.asked for executor in made] == [1, 0]
    start = worker.executor(answers).initialize_from_config
    assert worker.refuses(start, [1], says=f"not every worker of this engine captures.*{says}") == "1 caches"
    assert says in worker.log.text
    npu_replay.uninstall()
    assert "initialize_from_config" not in vars(worker.executor)


NEVER_STARTED: dict[str, tuple[Any, str]] = {
    "too old": (
        lambda worker: worker.releases.update({"vllm-ascend": "0.17.0rc1", "vllm": "0.17.0"}),
        "nobody checks those before 0.18.0",
    ),
    "no pair": (lambda worker: worker.releases.update(vllm="0.24.0"), "beside vLLM 0.24.0"),
    # Nothing would be told of it otherwise, and the engine would run as released.
    **{
        f"no {module}": (
            lambda worker, module=module: worker.env.delitem(sys.modules, module),
            rf"another than npu_replay knows.*{module}.*no such module",
        )
        for module in (V1, EXECUTOR)
    },
}


@pytest.mark.parametrize(("change", "says"), NEVER_STARTED.values(), ids=NEVER_STARTED)
def test_what_is_another_product_than_is_known_ends_the_start(worker: Worker, change: Any, says: str) -> None:
    change(worker)
    worker.refuses(plugin.register, says=says)
    assert RELEASED in worker.log.text
    assert "__init__" not in vars(worker.runner)


def test_a_runner_that_cannot_be_guarded_ends_the_start(worker: Worker) -> None:
    """Nobody opens a block in a worker, where such a failure would be said: it would run as released."""
    worker.env.delattr(sys.modules[V1], "NPUModelRunner")
    worker.refuses(plugin.register, says="capture of routed experts failed: AttributeError")


@pytest.mark.parametrize("ascend", ["0.21.0rc1", "0.30.0", "0.32.0rc1", "0.1.dev1"])
def test_a_worker_whose_classes_lack_a_part_ends_whatever_its_release(worker: Worker, ascend: str) -> None:
    def lacks(release: str) -> None:
        raise ReplayError(f"this vllm-ascend {release} is another than npu_replay knows")

    worker.releases.update({"vllm-ascend": ascend, "vllm": ascend.replace("rc1", "")})
    plugin.register()
    worker.runner(config())
    worker.env.setattr(parts, "check", lacks)
    worker.refuses(worker.runner, config(), says=f"this vllm-ascend {ascend} is another than")
    assert RELEASED in worker.log.text


def test_an_engine_that_is_not_asked_for_routes_starts_and_says_so(worker: Worker) -> None:
    plugin.register()
    made = config(asks=False, pipeline_parallel_size=2)
    assert worker.runner(made, "npu").vllm_config is made
    assert "but not enable_return_routed_experts: no routes are captured" in worker.log.text


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"enable_dbo": True}, "two half batches"),
        ({"ubatch_size": 2}, "two half batches"),
        ({"kv_transfer_config": "a connector"}, "kv_transfer_config"),
        ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "under xlite"),
        ({"additional_config": {"enable_force_eplb": True}}, "other experts than those that run"),
        ({"speculative_config": SimpleNamespace(method="ngram_gpu")}, "before drafts were left out"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_ends_the_start_before_weights_are_loaded(
    worker: Worker, planned: dict[str, object], says: str
) -> None:
    plugin.register()
    worker.refuses(worker.runner, config(**planned), says=says).init_routed_experts_capturer()
    assert worker.log.text.count(RELEASED) == 2


SPREAD = {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": True}
MTP = {"speculative_config": {"method": "mtp"}}


@pytest.mark.parametrize(
    ("version", "about", "says"),
    [
        ("0.23.0", {"planned": SPREAD, "quantization": "ascend", "soc": "A3"}, "no quantized experts"),
        ("0.18.0", {"planned": SPREAD}, "data_parallel_size"),  # vLLM's own
        ("0.23.0", {"planned": MTP}, "speculative_config"),
    ],
    ids=["quantized", "spread", "mtp"],
)
def test_engine_arguments_lift_what_the_plug_in_mends(version: str, about: dict[str, Any], says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        engine_arguments(version, vllm_ascend=version, **about)
    made = engine_arguments(version, vllm_ascend=version, capture=True, **about)
    assert made.environment == {"NPU_REPLAY_VLLM_ASCEND": "on"}
    assert made == engine_arguments(version, vllm_ascend="0.1.dev1+g5487946", capture=True, **about)
    assert made.arguments.get("async_scheduling") is (False if version == "0.18.0" else None)


PASS = {"compilation_config": {"pass_config": {"enable_sp": True}}, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("version", "vllm_ascend", "planned", "says"),
    [
        ("0.24.0", "0.23.0", {}, r"vllm-ascend 0\.23\.0 beside vLLM 0\.24\.0"),
        ("0.23.0", None, {}, "npu_replay captures there alone"),
        ("0.23.0", "0.23.0", PASS, "a compiler's pass"),
    ],
)
def test_engine_arguments_refuse_what_the_plug_in_would(
    version: str, vllm_ascend: str | None, planned: dict[str, object], says: str
) -> None:
    with pytest.raises(ReplayError, match=says):
        engine_arguments(version, vllm_ascend=vllm_ascend, planned=planned, capture=True)


@pytest.mark.parametrize(
    ("filter_", "given"),
    [("", "npu_replay"), ("ascend,mine", "ascend,mine,npu_replay"), ("npu_replay,mine", None)],
)
def test_engine_arguments_let_the_plug_in_pass_a_filter(
    worker: Worker, filter_: str, given: str | None
) -> None:
    worker.env.setenv("VLLM_PLUGINS", filter_)
    made = engine_arguments("0.23.0", vllm_ascend="0.23.0", capture=True)
    assert made.environment.get("VLLM_PLUGINS") == given


@pytest.mark.parametrize(
    ("variables", "ascend", "state", "why"),
    [
        ({}, "0.23.0", "works", "vllm-ascend 0.23.0 beside vLLM 0.23.0"),
        ({"VLLM_PLUGINS": "ascend,npu_replay"}, "0.23.0", "works", ""),
        (
            {"VLLM_PLUGINS": "ascend, other"},
            "0.23.0",
            "broken",
            "VLLM_PLUGINS=ascend, other leaves",
        ),
        # vLLM looks for it with the space
        ({"VLLM_PLUGINS": "ascend, npu_replay"}, "0.23.0", "broken", "leaves npu_replay out"),
        ({"NPU_REPLAY_AUTOLOAD": " off"}, "0.23.0", "broken", "NPU_REPLAY_AUTOLOAD= off leaves"),
        ({"NPU_REPLAY_VLLM_ASCEND": "0"}, "0.23.0", "missing", "it is off"),
        ({"NPU_REPLAY_VLLM_ASCEND": "0"}, "0.31.0", "missing", ""),
        ({"NPU_REPLAY_DISABLE": "1"}, "0.23.0", "missing", "NPU_REPLAY_DISABLE=on"),
    ],
)
def test_doctor_says_what_keeps_it_from_capturing(
    worker: Worker, variables: dict[str, str], ascend: str, state: str, why: str
) -> None:
    for name, value in variables.items():
        worker.env.setenv(name, value)
    entry = plugin.capability(Product("vllm-ascend", True, ascend), Product("vllm", True, "0.23.0"))
    assert entry.state == state
    assert why in entry.why
    assert (plugin.left_out() is not None) == (state == "broken")
    worker.env.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert ("isn't installed as a distribution" in plugin.filtered()) == (state != "broken")


# ---- what is looked for in a worker


HOME = "vllm_ascend.ops.fused_moe.experts_selector"
HOLDER = "vllm_ascend.quantization.methods.w8a8_dynamic"


def written_in(file: str) -> Callable[..., Any]:
    """A function of that file."""
    made: dict[str, Any] = {}
    exec(compile("def select_experts(): ...", f"/site/{file}", "exec"), made)
    return made["select_experts"]  # type: ignore[no-any-return]


OWN = written_in("experts_selector.py")


@functools.wraps(OWN)
def wrapped() -> None: ...


@pytest.mark.parametrize(
    ("where", "foreign"),
    [
        (HOME, written_in("my_patch.py")),
        (HOLDER, wrapped),
        (HOLDER, functools.partial(OWN)),
        (HOLDER, print),
    ],
    ids=["another file", "a wrapper", "a partial", "no Python"],
)
def test_somebody_elses_function_is_refused_where_it_stands(
    where: str, foreign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vllm-ascend's home of the function, in a module that holds it, and in somebody else's."""
    modules = {name: ModuleType(name) for name in (HOME, HOLDER, "somebody.s")}
    for name, module in modules.items():
        module.select_experts = OWN  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    ((function, holders),) = selectors()
    assert function is OWN
    assert {holder.__name__ for holder in holders} == modules.keys()
    modules[where].select_experts = foreign  # type: ignore[attr-defined]
    with pytest.raises(ReplayError, match=rf"{where}\.select_experts: somebody else has replaced"):
        list(selectors())


def test_vllm_ascends_own_patch_of_the_capture_is_no_stranger() -> None:
    files = ("routed_experts_capturer", "routed_experts_capture")
    for file in ("routed_experts_capturer.py", "patch_routed_experts_capture.py"):
        refuse_foreign(written_in(file), files, "capture")
    with pytest.raises(ReplayError, match="another patch that captures routes: take it out"):
        refuse_foreign(written_in("patch_other.py"), files, "capture")


class Routes(torch.nn.Module):
    layer_id = property(lambda self: self.number)

    def __init__(self, number: int, zero_experts: int = 0) -> None:
        super().__init__()
        self.number = number
        self.moe_config = object()
        self.zero_expert_num = zero_experts


def test_two_modules_of_one_layer_are_refused() -> None:
    assert list(layers(torch.nn.Sequential(Routes(1), torch.nn.Linear(1, 1), Routes(3)))) == [1, 3]
    with pytest.raises(ReplayError, match="two modules route for layer 1"):
        layers(torch.nn.Sequential(Routes(1), Routes(1)))


def compared(numbers: tuple[int, ...], columns: int = 4, zero_experts: int = 0) -> object:
    text = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)))
    routing = {number: Routes(number, zero_experts) for number in numbers}
    return plugin._held_against_config(runner, routing, torch.zeros(1, columns, 2))


def test_layers_are_held_against_the_models_config() -> None:
    assert compared((1, 2, 3))
    for numbers, columns in (((1, 3), 4), ((0, 1, 2, 3), 4), ((1, 2, 3), 3)):
        with pytest.raises(ReplayError, match="the layers that route aren't those of the model's config"):
            compared(numbers, columns)
    with pytest.raises(ReplayError, match=r"layers \[1, 2, 3\] choose experts that compute nothing"):
        compared((1, 2, 3), zero_experts=2)
