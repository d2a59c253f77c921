"""torch's compilers and torch.func: routers are eager while any block is open, and compiled again afterwards.

torch's own top-k stays what its compilers know. An update by torch.func is replayed as any other.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import npu_replay
from zoo import hugging_face
from zoo.toys import ToyModel, foreign, run, same, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def compiled_model() -> ToyModel:
    model = ToyModel()
    model.compile(backend="eager")
    model(tokens())
    return model


def test_blocks_that_overlap_keep_the_stance_and_torchs_names_until_the_last_one_ends() -> None:
    natives = torch.topk, torch.Tensor.topk
    first_model = compiled_model()
    two = compiled_model()
    first = npu_replay.record(first_model)
    second = npu_replay.record(two)
    first.__enter__()
    second.__enter__()
    first_model(tokens())
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    assert torch.topk is not natives[0]
    two(tokens())
    second.__exit__(None, None, None)
    assert stance() == "default"
    assert (torch.topk, torch.Tensor.topk) == natives
    assert "topk" not in vars(torch.Tensor)
    assert first.routes[0].layers == second.routes[0].layers == (0, 1)


@pytest.mark.parametrize("part", ["", "layers.0", "layers.0.router"], ids=["model", "layer", "router"])
@pytest.mark.parametrize("way", ["in place", "wrapped", "its forward"])
def test_a_compiled_module_is_replayed_and_its_graphs_stay_as_they_are_s1(way: str, part: str) -> None:
    """Hooks that come after a compilation are skipped in its graphs."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    holder = nn.Sequential(ToyModel())
    path = f"0.{part}".rstrip(".")
    module = holder.get_submodule(path)
    if way == "in place":
        module.compile(backend=backend)
    elif way == "wrapped":
        holder.set_submodule(path, torch.compile(module, backend=backend))
    else:
        module.forward = torch.compile(module.forward, backend=backend)
    called = holder[0]
    untouched = run(called)
    before = len(graphs)
    with npu_replay.record(called):
        assert same(run(called), untouched)
    routes = foreign()
    with npu_replay.observe(called) as seen, npu_replay.replay(called, routes):
        run(called)
    assert npu_replay.compare(seen.shown, routes).differing == 0
    assert same(run(called), untouched)
    assert len(graphs) == before > 0, "the block compiled anew, or left something that is compiled anew"
    torch.compiler.reset()


def test_the_stance_is_the_processs_and_left_alone_where_no_router_is_compiled() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        assert stance() == "default"
        model(tokens())


# Names of torch that its compilers know, in processes of their own: each learns them once

SCRIPT = """
    import sys
    import torch

    import npu_replay
    from npu_replay import routers
    from zoo.toys import ToyModel, ToyRouters, tokens

    routers.register("toy", ToyRouters())
    model = ToyModel()
    scores = torch.rand(4, 8)

    def best(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, 2)[0] + x.topk(2)[0]

    def check():
        torch.compiler.reset()
        compiled = torch.compile(lambda x: best(x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(scores), expected)

    expected = best(scores)
    if {first!r} == "before":
        check()
    else:
        assert "torch._dynamo" not in sys.modules
    with npu_replay.record(model):
        model(tokens())
        check()
    check()
    assert torch.equal(torch.jit.script(best)(scores), expected)
    with npu_replay.compat.cpu.lend():
        torch.compile(lambda x: x + torch.arange(8), backend="eager", fullgraph=True)(scores)
    torch.compiler.reset()
    torch.compile(lambda x: x + torch.arange(8), backend="eager", fullgraph=True)(scores)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["before", "inside"])
def test_torchs_compilers_take_a_top_k_before_inside_and_after_a_block(first: str, tmp_path: Path) -> None:
    """Dynamo; TorchScript, which reads the source, before and after it."""
    file = tmp_path / "compiled.py"
    file.write_text(textwrap.dedent(SCRIPT).format(first=first))
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(file)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "tests:" + ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


# torch.func: its transforms wrap all tensors, and tokens are compared all the same


@pytest.fixture
def setting() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    model = hugging_face.build("qwen3_moe")
    return model, dict(model.named_parameters()), hugging_face.batches(1)[0]


def gradients(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor], tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        called = functional_call(model, values, kwargs={"input_ids": tokens, "use_cache": False})
        return called.logits.square().mean()

    return grad(loss)(parameters)


@pytest.mark.parametrize("how", ["replay", "follow"])
def test_a_gradient_by_torch_func_is_that_of_the_recorded_experts(
    how: str, setting: tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]
) -> None:
    model, parameters, tokens = setting
    expected = gradients(*setting)
    if how == "follow":
        with npu_replay.follow(model) as following:
            with torch.no_grad():
                model(input_ids=tokens)
            replayed = gradients(*setting)
        assert following.metrics()["replayed"] == len(tokens)
    else:
        with torch.no_grad(), npu_replay.record(model) as recording:
            model(input_ids=tokens)
        with npu_replay.record(model) as inside:
            gradients(*setting)
        assert inside.routes == recording.routes
        with npu_replay.replay(model, recording.routes) as replay:
            replayed = gradients(*setting)
        assert replay.metrics()["tokens_compared"] == 1
    assert all(torch.equal(replayed[name], expected[name]) for name in parameters)
