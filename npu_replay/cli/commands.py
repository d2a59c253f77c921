"""The commands: what each takes, and how an error looks. Their modules are imported when one is run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from npu_replay.doctor import ABOUT as DOCTOR
from npu_replay.errors import ReplayError
from npu_replay.smoke.options import ABOUT as SMOKE
from npu_replay.smoke.options import Device
from npu_replay.tables import show, terminal

_DEBUG = "npu_replay.debug"
_PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
}
"""For the commands that read their options by themselves: they work without typer too."""


class DemoEngine(str, Enum):
    transformers = "transformers"
    vllm = "vllm"


class _Commands(typer.core.TyperGroup):
    """Shows what a user can mend as one message; --debug shows where it came from."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ReplayError, ModuleNotFoundError) as error:
            if ctx.meta.get(_DEBUG):
                raise
            # Anything else is a fault of npu_replay's, and keeps its traceback.
            _show(error)
            raise typer.Exit(1) from None


def _show(error: Exception) -> None:
    from rich.text import Text

    if isinstance(error, ReplayError):
        message, hint = str(error).removeprefix("[npu_replay] "), "--debug shows where it came from"
    else:
        message, hint = str(error), "npu-replay doctor says what is missing, and how to get it"
    console = terminal(stderr=True)
    console.print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)
    console.print(Text(hint, "dim"), soft_wrap=True)


app = typer.Typer(
    name="npu-replay",
    cls=_Commands,
    help="Routing replay for mixture-of-experts reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _set_debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


def _print_version(value: bool) -> None:
    if value:
        from npu_replay import __version__

        typer.echo(__version__)
        raise typer.Exit


DeviceOption = Annotated[
    Device, typer.Option(help="Where to run; auto takes an accelerator if there is one.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what an earlier run wrote.")]
DebugOption = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")
]
SizeOption = Annotated[int, typer.Option(min=1, help="Ranks of this axis (vp: virtual stages of a rank).")]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def everything(debug: DebugOption = False, version: VersionOption = False) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(
    device: DeviceOption = Device.auto,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, with and without replay.")] = 8,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the figures and numbers.")] = Path(
        "npu_replay_demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the sampling.")] = 0,
    engine: Annotated[DemoEngine, typer.Option(help="What rolls out.")] = DemoEngine.transformers,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a small MoE model with and without replay, and show the difference."""
    from npu_replay.demo.run import main

    main(device=device.value, steps=steps, out=out, seed=seed, force=force, engine=engine.value)


@app.command(help=DOCTOR, **_PASSED_ON)
def doctor(ctx: typer.Context, debug: DebugOption = False) -> None:
    from npu_replay.doctor.diagnose import run_command_line

    run_command_line(ctx.args)


@app.command()
def bench(
    device: DeviceOption = Device.auto,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of runs to take the median of.")] = 50,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="JSON file for the numbers.")] = None,
    force: ForceOption = False,
    delivery: Annotated[
        bool, typer.Option("--delivery", help="What routes cost on their way to the ranks, for this job:")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="The model's config.json, or its folder.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Without a config: MoE layers.")] = 48,
    topk: Annotated[int, typer.Option(min=1, help="Without a config: experts a token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Without a config: experts of a layer.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 512,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 8192,
    tp: SizeOption = 1,
    cp: SizeOption = 1,
    pp: SizeOption = 1,
    vp: SizeOption = 1,
    dp: SizeOption = 1,
    first_stage: Annotated[int | None, typer.Option(help="Layers of the first pipeline rank.")] = None,
    last_stage: Annotated[int | None, typer.Option(help="Layers of the last.")] = None,
    ranks_a_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node.")] = 8,
    rollout_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the rollout, if they are others than the training's.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Measure what record and replay cost a router's forward; or plan and measure how routes travel."""
    if not delivery:
        from npu_replay.bench.run import main

        main(device=device.value, pairs=pairs, out=out, force=force)
        return
    from npu_replay.bench import delivery as on_the_way
    from npu_replay.rollout.model_config import RoutedModel

    if config is None:
        model = RoutedModel(layers=tuple(range(layers)), num_layers=layers, num_experts=experts, topk=topk)
    else:
        model = RoutedModel.from_config(config)
    on_the_way.main(
        model=model,
        parallel={"tp": tp, "cp": cp, "pp": pp, "vp": vp, "dp": dp},
        stages={"first_stage": first_stage, "last_stage": last_stage},
        samples=samples,
        length=length,
        ranks_a_node=ranks_a_node,
        rollout_nodes=rollout_nodes,
        pairs=pairs,
        out=out,
        force=force,
    )


class RolloutEngine(str, Enum):
    """Whose answer it is."""

    auto = "auto"
    vllm = "vllm"
    sglang = "sglang"


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A file of routes, a folder of them, an .npy array, or an engine's answer."
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="The model's config.json, or its folder.")] = None,
    engine: Annotated[
        RolloutEngine, typer.Option(help="Which engine made it; auto finds out, for an answer.")
    ] = RolloutEngine.auto,
    engine_version: Annotated[
        str, typer.Option(metavar="V", help="The engine's release, such as 0.23.0: for likelier causes.")
    ] = "",
    prompt_ids: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON of the prompt's token ids, or a list of such.")
    ] = None,
    output_ids: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The same of the sampled ids.")
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="Which token the first row is of.")] = 0,
    sample: Annotated[
        str | None, typer.Option(metavar="KEY", help="One sample of a folder, one completion of an answer.")
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="PNG file for the picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what a file or an engine's answer holds, and whether its routes are right (else exits 1)."""
    from npu_replay.inspection.inspection import inspect as look
    from npu_replay.routes.atomic_file import check_place, write_whole

    if out is not None:
        check_place(out, overwrite=force)
    found = look(
        path,
        config=config,
        engine=None if engine is RolloutEngine.auto else engine.value,
        version=engine_version,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        start=start,
        sample=sample,
    )
    if as_json:
        typer.echo(found.to_json())
    else:
        from npu_replay.inspection.show import parts

        show(parts(found))
    if out is not None:
        from npu_replay.inspection import plots

        write_whole(out, plots.routes(found), overwrite=force)
    raise typer.Exit(0 if found.good else 1)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A file of routes, or a folder of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same kind of thing, to hold against it.")],
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="JSON file for the numbers.")
    ] = None,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Say how far two sets of routes of the same tokens are apart (exits 0 if they differ, too)."""
    from npu_replay.inspection.compare import compare_paths, parts
    from npu_replay.routes.atomic_file import check_place, write_whole

    if json is not None:
        check_place(json, overwrite=force)
    found = compare_paths(a, b)
    show(parts(found), soft_wrap=True)
    if json is not None:
        write_whole(json, found.to_json().encode(), overwrite=force)


@app.command(help=SMOKE, **_PASSED_ON)
def smoke(ctx: typer.Context, debug: DebugOption = False) -> None:
    from npu_replay.smoke.run import run_command_line

    run_command_line(ctx.args)
