"""The commands: what each takes, and how an error looks. Their modules are imported when one is run."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from npu_replay import doctor as doctors
from npu_replay import options
from npu_replay.cli.exits import FAULT, exit_code, failed, leave_pipe
from npu_replay.errors import ReplayError
from npu_replay.lazy import lazy
from npu_replay.options import Option, check_out, ending, write_out
from npu_replay.smoke import options as smokes
from npu_replay.tables import print_json, show

_DEBUG, _JSON = "npu_replay.debug", "npu_replay.json"
_CODES = "Exit codes: 0 all is well, 1 a fault was found, 2 the command line is wrong, 130 Ctrl-C."


class _Shown:
    """In --help, no type beside a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return found


class _Command(_Shown, typer.core.TyperCommand):
    pass


class _Commands(_Shown, typer.core.TyperGroup):
    """Shows what a user can mend as one message; --debug shows where it came from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            leave_pipe()
        except (ReplayError, ModuleNotFoundError) as error:
            if ctx.meta.get(_DEBUG):
                raise
            failed(error, "--debug shows where it came from", as_json=ctx.meta[_JSON])
            raise typer.Exit(exit_code(error)) from None
        except Exception as error:
            # What typer says of a wrong option. The rest is a fault of npu_replay's, and keeps its traceback.
            if ctx.meta[_JSON] and hasattr(error, "format_message"):
                print_json({"error": error.format_message()})
            raise


app = typer.Typer(
    name="npu-replay",
    cls=_Commands,
    help="Routing replay for mixture-of-experts reinforcement learning.",
    epilog=ending("docs/cli.md", "npu-replay doctor", "npu-replay inspect routes") + f"\n\n{_CODES}",
    no_args_is_help=True,
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


def _typed(option: Option, **more: Any) -> Any:
    """typer's kind of an option."""
    shown = None if issubclass(option.type, Enum) else option.metavar
    return typer.Option(
        option.flag, help=option.words, metavar=shown, rich_help_panel=option.group or None, **more
    )


def _out(words: str, metavar: str = "FILE", **more: Any) -> Any:
    return _typed(options.report(words, metavar)[1], **more)


_NUMBERS = "JSON file for the numbers."
_AS_JSON, _, _FORCE = options.report("")
JsonOption = Annotated[bool, _typed(_AS_JSON)]
ForceOption = Annotated[bool, _typed(_FORCE)]
DebugOption = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")
]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="The model's config.json, or its folder.")
]


def _add(name: str, about: str, spec: Sequence[Option], end: str, run: str) -> None:
    """A command that also works without typer: its options are written for both."""

    def command(**given: Any) -> None:
        del given["debug"]
        lazy(run)(**{key: one.value if isinstance(one, Enum) else one for key, one in given.items()})

    types: dict[str, Any] = {
        one.name: Annotated[one.type if one.default is not None else one.type | None, _typed(one)]
        for one in spec
    }
    types["debug"] = DebugOption
    defaults = {one.name: one.default for one in spec} | {"debug": False}
    command.__annotations__ = types
    command.__signature__ = signatures.Signature(  # type: ignore[attr-defined]
        [
            signatures.Parameter(
                key, signatures.Parameter.KEYWORD_ONLY, default=defaults[key], annotation=types[key]
            )
            for key in types
        ]
    )
    app.command(name, cls=_Command, help=about, epilog=end)(command)


@app.callback()
def everything(debug: DebugOption = False, version: VersionOption = False) -> None:
    """Take the options that stand before a command."""


_add("doctor", doctors.ABOUT, doctors.OPTIONS, doctors.END, "npu_replay.doctor.diagnose:run")


class RolloutEngine(str, Enum):
    """Whose answer it is."""

    auto = "auto"
    vllm = "vllm"
    sglang = "sglang"


@app.command(
    cls=_Command,
    epilog=ending(
        "docs/inspect.md",
        "npu-replay inspect answer.json --config config.json --out picture.png",
        "npu-replay inspect routes --json",
    ),
)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A file of routes, a folder of them, an .npy array, or an engine's answer."
        ),
    ],
    config: ConfigOption = None,
    engine: Annotated[
        RolloutEngine, typer.Option(help="Which engine made it; auto finds out, for an answer.")
    ] = RolloutEngine.auto,
    engine_version: Annotated[
        str, typer.Option(metavar="V", help="The engine's release, such as 0.23.0: for likelier causes.")
    ] = "",
    prompt_ids: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, metavar="FILE", help="JSON of the prompt's token ids, or a list of such."
        ),
    ] = None,
    output_ids: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="The same of the sampled ids.")
    ] = None,
    start: Annotated[int, typer.Option(min=0, metavar="N", help="Which token the first row is of.")] = 0,
    sample: Annotated[
        str | None, typer.Option(metavar="KEY", help="One sample of a folder, one completion of an answer.")
    ] = None,
    as_json: JsonOption = False,
    out: Annotated[
        Path | None, _out("PNG file for the picture, or .json for the findings.", dir_okay=False)
    ] = None,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what a file or an engine's answer holds, and whether its routes are right (else exits 1)."""
    from npu_replay.inspection.inspection import inspect as look

    check_out(out, force=force)
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
        print_json(found.to_json())
    else:
        from npu_replay.inspection.show import parts

        show(parts(found))
    if out is not None:
        from npu_replay.inspection import plots

        whole = found.to_json().encode() if out.suffix == ".json" else plots.routes(found)
        write_out(out, whole, force=force)
    raise typer.Exit(0 if found.good else FAULT)


@app.command(
    cls=_Command,
    epilog=ending(
        "docs/inspect.md", "npu-replay compare rollout trainer", "npu-replay compare a.routes b.routes --json"
    ),
)
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A file of routes, or a folder of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same kind of thing, to hold against it.")],
    as_json: JsonOption = False,
    out: Annotated[Path | None, _out(_NUMBERS, dir_okay=False)] = None,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Say how far two sets of routes of the same tokens are apart (exits 0 if they differ, too)."""
    from npu_replay.inspection.compare import compare_paths, parts

    check_out(out, force=force)
    found = compare_paths(a, b)
    if as_json:
        print_json(found.to_json())
    else:
        show(parts(found))
    write_out(out, found.to_json().encode(), force=force)


_add("smoke", smokes.ABOUT, smokes.OPTIONS, smokes.END, "npu_replay.smoke.run:run")
