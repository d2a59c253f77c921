"""What Python needs for npu_replay: it imports no framework and little of itself, and core no compat.

Without asserts and docstrings, and with every warning an error, it does the same.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs
import npu_replay
from npu_replay.compat.patching import install as installing
from test_house import PACKAGE, imported

AT_IMPORT = {
    *("environment", "errors", "lazy", "module_tree", "routers", "torch_loading"),
    *("parallel", "parallel.parallel_layout"),
    *("routes", "routes.arguments", "routes.checks", "routes.fingerprint"),
    *("compat", "compat.patching", "compat.patching.import_hook", "compat.patching.install"),
    "compat.patching.patches",
}
"""All of npu_replay that its import brings."""
NOT_IMPORTED = (
    "transformers",
    "megatron",
    "mindspeed",
    "torch_npu",
    "vllm",
    "sglang",
    "verl",
    "tensordict",
    "ray",
    "hydra",
    "safetensors",
    "matplotlib",
)
CORE = sorted(
    [
        PACKAGE / "routers.py",
        *(
            path
            for room in ("routes", "seam", "sessions", "following", "parallel", "rollout")
            for path in (PACKAGE / room).glob("*.py")
        ),
    ]
)


def answer(code: str, path: Path | None = None, **environment: str) -> Any:
    """What `code` prints in a process of its own, which finds modules in `path` too."""
    return jobs.printed(code, path=[path] if path else [], env=environment)


@pytest.mark.slow
def test_importing_it_brings_little_of_itself_and_no_framework_nor_does_a_report() -> None:
    code = """
import npu_replay
first = list(sys.modules)
str(npu_replay.report())
import npu_replay.cli, npu_replay.doctor.self_test
print(json.dumps([first, list(sys.modules)]))
"""
    loaded, later = answer(code)
    assert {name.partition(".")[2] for name in loaded if name.startswith("npu_replay.")} == AT_IMPORT
    assert not {name.partition(".")[0] for name in loaded + later} & set(NOT_IMPORTED)


@pytest.mark.parametrize("first", ["", "import npu_replay.routes.fingerprint, npu_replay.cli.commands"])
def test_every_public_name_is_what_its_module_has(first: str) -> None:
    """fingerprint is a module and a function: whoever imports the module mustn't take the function away."""
    code = f"""
import threading, npu_replay
{first}
barrier, found = threading.Barrier(8), []
def take():
    barrier.wait()
    found.append((npu_replay.record, npu_replay.compat.verl, npu_replay.report))
threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
kinds = {{name: type(getattr(npu_replay, name)).__name__ for name in npu_replay.__all__}}
print(json.dumps([kinds, len(found), len(set(found))]))
"""
    kinds, *first_uses = answer(code)
    assert first_uses == [8, 1], "the first use in many threads is one import"
    assert {name for name, kind in kinds.items() if kind == "module"} == {"compat", "delivery", "routers"}
    assert set(kinds.values()) <= {"module", "function", "type", "ABCMeta"}


def test_a_name_is_the_same_object_wherever_it_is_taken_from() -> None:
    for value in (getattr(npu_replay, name) for name in npu_replay.__all__):
        if not inspect.ismodule(value):
            assert getattr(sys.modules[value.__module__], value.__name__) is value
    for package in (npu_replay, npu_replay.compat):
        assert set(package.__all__) <= set(dir(package))
        with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'recrod'"):
            package.recrod  # noqa: B018


@pytest.mark.slow
def test_pytest_may_load_it_as_a_plugin(tmp_path: Path) -> None:
    """Its loader has another interface than Python's own."""
    command = [sys.executable, "-m", "pytest", "-p", "npu_replay", "--version"]
    subprocess.run(command, check=True, cwd=tmp_path)


def test_every_module_of_compat_is_public() -> None:
    modules = {module.name for module in pkgutil.iter_modules(npu_replay.compat.__path__)}
    assert set(npu_replay.compat.__all__) == modules


@pytest.mark.parametrize("first", ["npu_replay", "npu_replay.sessions.session", "npu_replay.routers"])
def test_routers_of_all_products_are_known_and_made_once_whatever_is_imported_first(first: str) -> None:
    code = f"""
import {first}
from npu_replay import routers
before = "npu_replay.compat.megatron.routers" in sys.modules
kinds = routers._registered()
again = routers._registered()
made_once = [id(kind) for kind in kinds] == [id(kind) for kind in again]
print(json.dumps([before, [type(kind).__name__ for kind in kinds], routers.kinds(), made_once]))
"""
    kinds = ["MegatronRouters", "TransformersRouters"]
    assert answer(code) == [False, kinds, ["megatron-core", "transformers"], True]


SAYS = "import sys\nshims = [name for name in sys.modules if name.startswith('npu_replay.compat.')]\n"
SHIMS = {
    product: {f"npu_replay.compat.{shim}" for shim in shims} for product, shims in installing._SHIMS.items()
}
ALL = set().union(*SHIMS.values())
TAKES = f"[importlib.import_module(name) for name in {list(SHIMS)}]"


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages under the products' names: each notes which shims are there when its code runs."""
    root = tmp_path_factory.mktemp("products")
    for product in SHIMS:
        folder = root.joinpath(*product.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(SAYS)
    return root


@pytest.mark.parametrize("product", SHIMS)
def test_a_products_shims_are_imported_before_its_own_code_runs(product: str, products: Path) -> None:
    code = f"""
import npu_replay, importlib
before = list(sys.modules)
print(json.dumps([before, importlib.import_module({product!r}).shims]))
"""
    before, seen = answer(code, products)
    assert not ALL & set(before)
    assert SHIMS[product] <= set(seen)
    for shim in SHIMS[product]:
        assert callable(importlib.import_module(shim).install)


def test_products_that_are_there_get_their_shims_at_once_and_none_if_turned_off(products: Path) -> None:
    after = f"import importlib, npu_replay; {TAKES}"
    before = f"import importlib; {TAKES}; import npu_replay"
    says = "; print(json.dumps(list(sys.modules)))"
    assert set(answer(before + says, products)) >= ALL
    for order in (after, before):
        assert not ALL & set(answer(order + says, products, NPU_REPLAY_DISABLE="1"))


@pytest.mark.parametrize("source", CORE, ids=lambda path: path.stem)
def test_the_core_needs_torch_and_numpy_alone(source: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch", "numpy", "npu_replay"}
    assert {name.partition(".")[0] for name in imported(source)} <= allowed


# Other ways to run Python


SCRIPT = """
import sys

import torch

import npu_replay
from npu_replay import ParallelLayout, RoutedExperts, errors, routers
from zoo.toys import EXPERTS, ToyModel, ToyRouters, tokens

def check(fine, what):  # -O drops asserts
    if not fine:
        raise SystemExit(f"wrong: {what}")

def refused(kind, act):
    try:
        act()
    except kind:
        return
    raise SystemExit(f"not refused: {kind.__name__}")

routers.register("toy", ToyRouters())
for recompute in (None, "reentrant", "non-reentrant"):
    model, x = ToyModel(recompute=recompute), tokens().requires_grad_()
    with npu_replay.record(model) as recording:
        model(x).sum().backward()
    ids = (recording.routes[0].ids.long() + 1) % EXPERTS
    routes = [RoutedExperts(ids=ids, layers=[0, 1], num_experts=EXPERTS)]
    with npu_replay.observe(model) as seen, npu_replay.replay(model, routes, live_mismatch=True) as session:
        model(x).sum().backward()
    check(torch.equal(seen.shown[0].ids.long().sort().values, ids.sort().values), "what the routers show")
    check(session.metrics()["live_mismatch"] > 0, "live_mismatch")
    def twice():
        with npu_replay.replay(model, routes):
            model(x)
            model(x)
    refused(errors.MicroBatchError, twice)
check(ParallelLayout(tp=2, tp_rank=1).tp_rank == 1, "ParallelLayout")
refused(errors.ReplayError, lambda: ParallelLayout(tp=2, tp_rank=3))
refused(errors.InvalidRoutes, lambda: RoutedExperts(ids=ids + 90, layers=[0, 1], num_experts=EXPERTS))
npu_replay.report()
"""


@pytest.mark.slow
def test_without_asserts_and_with_warnings_as_errors_the_blocks_are_the_same() -> None:
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests)])
    environment = os.environ | {"PYTHONPATH": path}  # with a cache: to compile all of torch takes 20 s
    command = [sys.executable, "-OO", "-W", "error", "-bb", "-X", "dev", "-c", SCRIPT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
