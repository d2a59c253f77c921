"""One arm with one seed, in processes of its own; `run.py` starts it.

Megatron trains in one process that has vLLM in it. Under FSDP2 each process of torchrun trains a part, and
vLLM's server is another process still.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import checkpoints
import torch
import torch.distributed as dist
from loop import Grpo
from policies import Fsdp, Megatron
from roads import ROADS
from server import Server
from settings import ARMS, Settings

from examples.qwen3_moe.vllm_engine import Vllm
from npu_replay.devices import megatron_on


def main() -> None:
    args = arguments()
    about = json.loads((args.out / "settings.json").read_text())
    settings = Settings(**{field.name: about[field.name] for field in fields(Settings)})
    taught = str(args.out / "taught")
    logging.disable(logging.WARNING)  # of transformers and vLLM, several a step
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if args.server:
            dist.init_process_group("gloo")
            engine: Any = Server(args.server, taught)
            policy: Any = Fsdp(args.out / "taught")
        else:
            stack.enter_context(megatron_on(torch.device("cpu")))
            engine = Vllm(taught, seed=args.seed, **about["engine"])
            policy = Megatron(args.out / "taught")
        road = ROADS[args.road](engine, args.rows.with_suffix(""))
        weights = args.rows.with_suffix(".weights")
        run = Grpo(policy, road, ARMS[args.arm], settings, args.seed, weights)
        for row in run.steps(checkpoints.load(args.rows, run.state())):
            checkpoints.save(args.rows, run.state(), row)
    if args.server:
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="settings.json and taught/ lie here")
    parser.add_argument("--rows", type=Path, required=True, help="a line of JSON for each step")
    parser.add_argument("--road", choices=ROADS, default="answer")
    parser.add_argument("--server", help="vLLM's; without it vLLM runs in this process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
