"""Compiled modules around a router: eager while any block is open, compiled again afterwards.

And torch.compile inside a block and after it: torch's own top-k stays what its compilers know.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import npu_replay
from zoo.toys import ToyModel, tokens

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
    one = compiled_model()
    two = compiled_model()
    first = npu_replay.record(one)
    second = npu_replay.record(two)
    first.__enter__()
    second.__enter__()
    one(tokens())
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    assert torch.topk is not natives[0]
    two(tokens())
    second.__exit__(None, None, None)
    assert stance() == "default"
    assert (torch.topk, torch.Tensor.topk) == natives
    assert "topk" not in vars(torch.Tensor)
    assert first.routes[0].layers == second.routes[0].layers == (0, 1)


def test_the_stance_is_the_processs_and_left_alone_where_no_router_is_compiled() -> None:
    model = ToyModel()
    with npu_replay.record(model):
        assert stance() == "default"
        model(tokens())


# Names of torch that its compilers know, each in a process of its own

COMPILED = """
    import sys
    import torch

    import npu_replay
    from npu_replay import routers
    from zoo.toys import ToyModel, ToyRouters, tokens

    routers.register("toy", ToyRouters())
    model = ToyModel()
    scores = torch.rand(4, 8)

    def best(x):
        return torch.topk(x, 2).values + x.topk(2).values

    def compiled():
        torch.compiler.reset()
        return torch.compile(lambda x: best(x), backend="eager", fullgraph=True)(scores)

    expected = best(scores)
    if {first!r} == "before":
        assert torch.equal(compiled(), expected)
    else:
        assert "torch._dynamo" not in sys.modules
    with npu_replay.record(model):
        model(tokens())
        assert torch.equal(compiled(), expected)
    assert torch.equal(compiled(), expected)
    with npu_replay.compat.cpu.lend():
        torch.compile(lambda x: x + torch.arange(8), backend="eager", fullgraph=True)(scores)
    torch.compiler.reset()
    torch.compile(lambda x: x + torch.arange(8), backend="eager", fullgraph=True)(scores)
"""


def run_python(*arguments: str) -> None:
    """Run Python, in a process of its own; it has to end well."""
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "tests:" + ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["before", "inside"])
def test_a_graph_with_a_top_k_compiles_before_inside_and_after_a_block(first: str) -> None:
    """In a process of its own: dynamo learns torch's names once."""
    code = textwrap.dedent(COMPILED).format(first=first)
    run_python("-W", "error::UserWarning", "-c", code)


SCRIPTED = """
    import torch

    import npu_replay
    from npu_replay import routers
    from zoo.toys import ToyModel, ToyRouters, tokens

    routers.register("toy", ToyRouters())
    model = ToyModel()
    scores = torch.rand(4, 8)

    def best(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, 2)[0] + x.topk(2)[0]

    def again(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, 2)[0] + x.topk(2)[0]

    expected = best(scores)
    if {first!r} == "before":
        assert torch.equal(torch.jit.script(best)(scores), expected)
    with npu_replay.record(model):
        model(tokens())
        assert torch.equal(torch.jit.script(best)(scores), expected)
    assert torch.equal(torch.jit.script(again)(scores), expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["before", "inside"])
def test_torchscript_compiles_a_top_k_before_inside_and_after_a_block(first: str, tmp_path: Path) -> None:
    """It has a table of torch's names too, which it makes once. A function is compiled once as well."""
    code = textwrap.dedent(SCRIPTED).format(first=first)
    (tmp_path / "scripted.py").write_text(code)
    run_python(str(tmp_path / "scripted.py"))
