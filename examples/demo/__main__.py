"""Reads the command line of python -m examples.demo, and runs the demo."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from npu_replay import screen
from npu_replay.cli.exits import INTERRUPTED, exit_code, failed
from npu_replay.compat import probe
from npu_replay.devices import megatron_on, one_thread, pick
from npu_replay.errors import ReplayError
from npu_replay.options import Device, WrongOption, check_out, write_out
from npu_replay.tables import print_json, show, to_json

JSON, PNG, LOG = "demo.json", "demo.png", "demo.log"

ABOUT = "Train a small MoE model with and without replay, and show the difference (about 15 s on a CPU)."
END = """examples:
  bash ci/demo.sh
  bash ci/demo.sh --steps 2 --out /tmp/demo --force
"""


def _steps(value: str) -> int:
    if int(value) < 1:  # argparse itself says that a word is no int
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return int(value)


def options(given: list[str] | None = None) -> argparse.Namespace:
    """Read a command line into what `run` takes."""
    reader = argparse.ArgumentParser(
        prog="bash ci/demo.sh",
        description=ABOUT,
        epilog=END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reader.add_argument("--device", choices=[one.value for one in Device], default="auto")
    reader.add_argument("--steps", type=_steps, default=8, metavar="N", help="Training steps.")
    reader.add_argument("--seed", type=int, default=0, metavar="N", help="Of the weights and of sampling.")
    reader.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    reader.add_argument("--json", action="store_true", help="Print JSON.")
    out = Path("npu_replay_demo")
    words = "Folder for demo.json, demo.png and demo.log."
    reader.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=words)
    reader.add_argument("--force", action="store_true", help="Overwrite what is there.")
    return reader.parse_args(given)


def run(given: argparse.Namespace) -> None:
    """Run the demo, print its tables, and write demo.json and demo.png.

    Raises:
        ReplayError: a file is there already and --force isn't given, or a part is missing.
    """
    probe.require(probe.MEGATRON, "the demo")
    from examples.demo import job, picture, rollout, tables

    rollout.require(given.engine)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongOption(
            f"the folder can't be made ({error})", where=str(given.out), cause="another --out is meant"
        ) from error
    for name in (JSON, PNG):
        check_out(given.out / name, force=given.force)
    with screen.quiet("demo", given.out / LOG):
        with one_thread(), megatron_on(where := pick(given.device)), screen.progress(5) as tell:
            result = job.run(where, given.steps, given.seed, given.engine, tell)
        if given.json:
            print_json(result)
        else:
            show(tables.parts(result))
        write_out(given.out / JSON, to_json(result).encode(), force=given.force)
        write_out(given.out / PNG, picture.draw(result), force=given.force)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; show what a user can mend as one message."""
    given = options(arguments)
    try:
        run(given)
    except (ReplayError, ModuleNotFoundError) as error:
        failed(error, as_json=given.json)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
