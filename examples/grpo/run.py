"""GRPO with a live vLLM, with replay and without: teaches a small Qwen3-MoE, runs the arms, draws the curves.

    bash ci/grpo.sh                                        # three arms and FSDP2, a few steps
    bash ci/grpo.sh --arms none R2 R3 TIS TIS+R3 --seeds 0 1 2 --steps 40 --out out/grpo

Everything lies in --out afterwards: grpo.json, which `curves.py` draws again, grpo.png, and of each run a
file with a line a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import clone  # noqa: F401  before what imports examples.qwen3_moe
import curves
import task
import torch
from roads import ROADS
from server import serve
from settings import ARMS, Settings

import npu_replay

HERE = Path(__file__).parent
ENGINE: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 256, "block_size": 32}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = replace(
        Settings(),
        steps=args.steps,
        mini_batches=args.mini_batches,
        rollout_bits=args.rollout_bits,
        learning_rate=args.learning_rate,
    )
    about = asdict(settings) | {
        "layers": args.layers,
        "experts": args.experts,
        "taught_steps": args.teach,
        "trainer": args.trainer,
        "road": args.road,
        "engine": ENGINE,
    }
    # What ran is what is there now: the tree may have moved on when the last step is done.
    started, ran = time.monotonic(), versions()
    prepare(args, about)

    wanted = [(arm, seed) for seed in args.seeds for arm in args.arms]
    with ThreadPoolExecutor(1 if args.trainer == "fsdp" else args.jobs) as pool:
        runs = list(pool.map(lambda pair: run(*pair, args), wanted))
    result = {
        "settings": about,
        "versions": ran,
        "command": " ".join(["python", "examples/grpo/run.py", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - started),
        "runs": runs,
    }
    (args.out / "grpo.json").write_text(json.dumps(result))
    curves.draw(args.out / "grpo.json", args.out / "grpo.png")
    curves.show(result)
    print(f"Wrote {args.out / 'grpo.json'} and {args.out / 'grpo.png'}, {result['seconds']} s")


def prepare(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """Write settings.json and taught/, unless a run that was cut off has left them."""
    place, text = args.out / "settings.json", json.dumps(about, indent=1)
    if place.exists():
        if place.read_text() != text:
            raise SystemExit(f"{args.out} holds a run with other settings: take another --out")
        print(f"going on with what {args.out} holds", flush=True)
        return
    torch.manual_seed(0)
    pupil = task.model(args.layers, args.experts)
    loss = task.teach(pupil, args.teach)
    task.save(pupil, args.out / "taught")
    weights = sum(weight.numel() for weight in pupil.parameters())
    print(f"taught: {weights:,} weights, {args.teach} steps, loss {loss:.3f}", flush=True)
    place.write_text(text)


def run(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One arm with one seed, in processes of its own; the rows that it wrote."""
    name = f"{arm}-{seed}"
    rows, log = args.out / f"{name}.jsonl", args.out / f"{name}.log"
    command = [sys.executable, str(HERE / "job.py"), "--arm", arm, "--seed", str(seed)]
    command += ["--out", str(args.out), "--rows", str(rows), "--road", args.road]
    started = time.monotonic()
    with engine(args, seed, args.out / f"{name}.vllm.log") as url:
        if url:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            command = [*launch, "--master-port", str(args.port + 1), *command[1:], "--server", url]
        with log.open("wb") as out:
            ended = subprocess.run(command, stdout=out, stderr=out).returncode
    if ended:
        lines = log.read_text(errors="replace").splitlines()
        for line in dict.fromkeys(line for line in lines if "Error: " in line):
            print(line, file=sys.stderr)
        raise SystemExit(
            f"{name} ended with {ended}; more in {log}. The same command goes on after its last step."
        )
    steps = [curves.rounded(json.loads(line)) for line in rows.read_text().splitlines()]
    print(
        f"{name}: {len(steps)} steps in {time.monotonic() - started:.0f} s, {curves.summary(steps)}",
        flush=True,
    )
    return {"arm": arm, "seed": seed, "rows": steps}


@contextlib.contextmanager
def engine(args: argparse.Namespace, seed: int, log: Path) -> Iterator[str]:
    """The address of a server of its own, for FSDP2; none for Megatron, which has vLLM in its process."""
    if args.trainer == "megatron":
        yield ""
        return
    with serve(str(args.out / "taught"), log, args.port, seed=seed, **ENGINE) as server:
        yield server.url


def versions() -> dict[str, str]:
    """What ran."""
    import transformers
    import vllm

    try:
        from megatron.core import __version__ as megatron
    except ImportError:
        megatron = "none"
    commit = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return {
        "npu_replay": npu_replay.__version__,
        "commit": subprocess.run(commit, cwd=HERE, capture_output=True, text=True).stdout.strip(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "megatron-core": megatron,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["none", "R3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--teach", type=int, default=60, help="steps on right answers before")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--mini-batches", type=int, default=4, help="optimizer steps a rollout")
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument(
        "--rollout-bits", type=int, default=7, help="bits of mantissa of the engine's weights; 7 is bfloat16"
    )
    parser.add_argument(
        "--trainer",
        choices=("megatron", "fsdp"),
        default="megatron",
        help="fsdp: 2 processes, vLLM over HTTP",
    )
    parser.add_argument("--road", choices=ROADS, default="answer", help="how routes get to the ranks")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, of Megatron")
    parser.add_argument("--port", type=int, default=18100)
    parser.add_argument("--out", type=Path, default=Path("out/grpo"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
