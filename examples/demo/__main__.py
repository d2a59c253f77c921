"""The demo: python -m examples.demo, or bash ci/demo.sh, which gets ready what it needs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from npu_replay import screen
from npu_replay.cli.exits import ended
from npu_replay.compat import probe
from npu_replay.devices import megatron_on, one_thread, pick
from npu_replay.options import Parser, WrongOption, at_least, check_out, write_out
from npu_replay.tables import print_json, show

JSON, PNG, LOG = "demo.json", "demo.png", "demo.log"


def read(arguments: Sequence[str]) -> Namespace:
    """Read a command line."""
    about = "Train a small MoE model with and without replay, and show the difference (about 15 s on a CPU)."
    examples = "bash ci/demo.sh", "bash ci/demo.sh --steps 2 --out /tmp/demo --force"
    reader = Parser("bash ci/demo.sh", about, examples, "docs/cli.md")
    reader.add_device()
    words = "Training steps, with and without replay; 8 if not given."
    reader.add_argument("--steps", type=at_least(1), default=8, metavar="N", help=words)
    words = "Seed of the weights and of the sampling."
    reader.add_argument("--seed", type=int, default=0, metavar="N", help=words)
    words = "What rolls out."
    reader.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help=words)
    reader.add_report(f"Folder for {JSON}, {PNG} and {LOG}.", "FOLDER")
    reader.set_defaults(out=Path("npu_replay_demo"))
    return reader.parse_args(arguments)


def run(args: Namespace) -> None:
    """Run the demo, print its tables, and write demo.json and demo.png.

    Raises:
        ReplayError: a file is there already and --force isn't given, or a part is missing.
    """
    probe.require(probe.MEGATRON, "the demo")
    from examples.demo import job, picture, rollout, tables

    rollout.require(args.engine)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongOption(
            f"the folder can't be made ({error})", where=str(args.out), cause="another --out is meant"
        ) from error
    for name in (JSON, PNG):
        check_out(args.out / name, force=args.force)
    with screen.quiet("demo", args.out / LOG):
        with one_thread(), megatron_on(where := pick(args.device)):
            result = job.run(where, args.steps, args.seed, args.engine, screen.tell)
        if args.json:
            print_json(json.dumps(result, indent=1))
        else:
            show(tables.parts(result))
        write_out(args.out / JSON, json.dumps(result, indent=1).encode(), force=args.force)
        write_out(args.out / PNG, picture.draw(result), force=args.force)


def main(arguments: Sequence[str]) -> int:
    """Run the demo and return its exit code."""
    return ended(lambda: run(read(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
