"""Define what each command takes and prints. A command's module is imported when it runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import npu_replay
from npu_replay.cli.exits import FAULT, WRONG
from npu_replay.options import Parser, at_least, check_out, write_out
from npu_replay.screen import err
from npu_replay.smoke.options import SIZES, Options
from npu_replay.tables import print_json, show

ABOUT = """Routing replay for mixture-of-experts reinforcement learning.

Exit codes: 0 all is well, 1 a fault was found, 2 the command line is wrong, 130 Ctrl-C."""


def run(arguments: Sequence[str]) -> int | None:
    """Read a command line, run its command and return the exit code."""
    reader = parser()
    options = reader.parse_args(arguments)
    if options.command is None:
        reader.print_help()
        return WRONG
    code: int | None = options.run(options)
    return code


def parser() -> Parser:
    examples = "npu-replay doctor", "npu-replay inspect routes"
    reader = Parser("npu-replay", ABOUT, examples, "docs/cli.md")
    reader.add_argument("--version", action="version", version=npu_replay.__version__)
    commands = reader.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    doctor = _add(
        commands,
        "doctor",
        _doctor,
        "Say whether replay works here, and what to do if it doesn't (then exits 1).",
        "npu-replay doctor",
        "npu-replay doctor --json > doctor.json",
    )
    doctor.add_argument("--imports", action="store_true", help="Also import transformers (some seconds).")
    doctor.add_report("JSON file for what was found.")

    inspect = _add(
        commands,
        "inspect",
        _inspect,
        "Say what a file or an engine's answer holds, and whether its routes are right (else exits 1).",
        "npu-replay inspect answer.json --config config.json",
        "npu-replay inspect routes --json",
    )
    add = inspect.add_argument
    add(
        "path",
        type=Path,
        metavar="FILE",
        help="A file of routes, a folder of them, an .npy array, or an engine's answer.",
    )
    add("--config", type=Path, metavar="PATH", help="The model's config.json, or its folder.")
    add(
        "--engine-version",
        default="",
        metavar="V",
        help="The engine's release, such as 0.23.0: for likelier causes.",
    )
    add("--prompt-ids", type=Path, metavar="FILE", help="JSON list of the prompt's ids.")
    add("--output-ids", type=Path, metavar="FILE", help="The same of the sampled ids.")
    add("--start", type=at_least(0), default=0, metavar="N", help="Which token the first row is of.")
    add("--sample", metavar="KEY", help="One sample of a folder, one completion of an answer.")
    inspect.add_report("JSON file for what was found.")

    compare = _add(
        commands,
        "compare",
        _compare,
        "Say how far two sets of routes of the same tokens are apart (exits 0 if they differ, too).",
        "npu-replay compare rollout trainer",
        "npu-replay compare a.routes b.routes --json",
    )
    add = compare.add_argument
    add("a", type=Path, metavar="A", help="What RoutedExperts.save wrote, or a folder of RouteStore.")
    add("b", type=Path, metavar="B", help="The same kind of thing, to hold against it.")
    compare.add_report("JSON file for the numbers.")

    smoke = _add(
        commands,
        "smoke",
        _smoke,
        "Try routing replay on this stack, device and split (exits 1 if something fails).",
        "python -m npu_replay smoke --recompute",
        "torchrun --nproc-per-node 4 -m npu_replay smoke --tp 2 --pp 2 --out smoke.json",
    )
    smoke.add_device()
    smoke.add_argument("--recompute", action="store_true", help="Try full activation recompute too.")
    smoke.add_argument(
        "--patience",
        type=at_least(1),
        default=60,
        metavar="SECONDS",
        help="Seconds that a rank waits for another before it says so; 60 if not given.",
    )
    split = smoke.add_argument_group("the job's split")
    for name, words in SIZES.items():
        split.add_argument(f"--{name}", type=at_least(1), default=1, metavar="N", help=words)
    smoke.add_report("JSON file for the results, to attach to a report.")
    return reader


def _add(
    commands: Any, name: str, work: Callable[[Namespace], int | None], about: str, *examples: str
) -> Parser:
    page = f"docs/{'versions' if name == 'smoke' else 'cli'}.md"
    reader: Parser = commands.add_parser(name, help=about, about=about, examples=examples, page=page)
    reader.set_defaults(run=work)
    return reader


def _end(options: Namespace, findings: Any) -> None:
    """Print the findings, and write them as JSON to the file of --out."""
    if options.json:
        print_json(findings.to_json())
    else:
        show(findings.parts())
    write_out(options.out, findings.to_json().encode(), force=options.force)


def _doctor(options: Namespace) -> int:
    from npu_replay.doctor.diagnose import diagnose

    check_out(options.out, force=options.force)
    err().write("Imports what a job imports and tries a replay on each device: 10 seconds to a minute\n")
    diagnosis = diagnose(imports=options.imports)
    _end(options, diagnosis)
    return 0 if diagnosis.works else FAULT


def _inspect(options: Namespace) -> int:
    from npu_replay.inspection.inspection import inspect

    check_out(options.out, force=options.force)
    findings = inspect(
        options.path,
        config=options.config,
        version=options.engine_version,
        prompt_ids=options.prompt_ids,
        output_ids=options.output_ids,
        start=options.start,
        sample=options.sample,
    )
    _end(options, findings)
    return 0 if findings.good else FAULT


def _compare(options: Namespace) -> None:
    from npu_replay.inspection.compare import compare_paths

    check_out(options.out, force=options.force)
    _end(options, compare_paths(options.a, options.b))


def _smoke(options: Namespace) -> int:
    from npu_replay.smoke.run import main

    return main(Options.of(options))
