"""vLLM's HTTP server as the rollout engine: started, asked, given new weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch

from examples.qwen3_moe.sample import Sample
from examples.qwen3_moe.vllm_engine import PLANNED
from npu_replay import ReplayError, RoutedModel, from_vllm
from npu_replay.compat.vllm import engine_arguments

AT_ONCE = 32
"""Requests that are sent before their answers come."""
PATIENCE = 300
"""Seconds that an answer may take."""


class Server:
    """A running one. Anything that goes wrong in it is a ReplayError here, before an optimizer steps.

    Args:
        url: "http://127.0.0.1:8000".
        folder: the model that it serves, as it was started with it.
    """

    def __init__(self, url: str, folder: str) -> None:
        self.url, self.folder = url, folder
        self._model = RoutedModel.from_config(folder)

    @property
    def version(self) -> int | None:
        """How often weights have come since the start, as the server says it; a new one knows none."""
        version = str(self._ask("/weight_info")["weight_version"])
        return int(version) if version.isdigit() else None

    def sample(
        self, prompts: Sequence[Sequence[int]], *, each: int, longest: int, temperature: float = 1.0
    ) -> list[Sample]:
        """As `Vllm.sample` does."""
        version = self.version
        asked = [
            {
                "model": self.folder,
                "prompt": list(prompt),
                "n": each,
                "max_tokens": longest,
                "temperature": temperature,
                "logprobs": 0,
                "return_token_ids": True,
            }
            for prompt in prompts
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda request: self._ask("/v1/completions", request), asked))
        if self.version != version:
            raise ReplayError(
                "the server's weights changed while it sampled",
                where=self.url,
                expected=f"version {version}",
                got=self.version,
                cause="another job that gives it weights, or a restart",
            )
        return [
            sample
            for prompt, answer in zip(prompts, answers, strict=True)
            for sample in self._samples(prompt, answer, version)
        ]

    def load(self, folder: str) -> int:
        """As `Vllm.load` does; the server itself keeps the version."""
        version = self.version
        if version is None:
            raise ReplayError(
                "the server doesn't know how often it was given weights",
                where=self.url,
                expected="a number",
                got=self._ask("/weight_info"),
                cause="a server that was started again: go on from the last checkpoint",
            )
        self._ask("/collective_rpc", {"method": "take_weights", "args": [folder]})
        self._ask("/reset_prefix_cache", {})
        self.count(version + 1)
        return version + 1

    def count(self, version: int) -> None:
        """Tell the server how often it was given weights."""
        self._ask("/update_weight_version", {"new_version": str(version)})

    def _samples(self, prompt: Sequence[int], answer: Any, version: int | None) -> Iterator[Sample]:
        """The prompt is ours, and is held against the answer's: another request's rows don't pass."""
        all_routes = from_vllm(answer, self._model, prompt_token_ids=list(prompt), weight_version=version)
        for choice, routes in zip(
            sorted(answer["choices"], key=lambda choice: choice["index"]), all_routes, strict=True
        ):
            yield Sample(
                tokens=torch.tensor([*prompt, *choice["token_ids"]]),
                prompt=len(prompt),
                log_probs=torch.tensor(choice["logprobs"]["token_logprobs"]),
                routes=routes,
            )

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            failure: Any = error.read().decode(errors="replace")[:500]
        except (URLError, OSError) as error:
            failure = error
        raise ReplayError(
            "the rollout engine gave no answer",
            where=self.url + path,
            expected="an answer",
            got=failure,
            cause="a server that has ended or refuses the request; its log says more",
        )


@contextlib.contextmanager
def serve(folder: str, log: Path, port: int, **planned: Any) -> Iterator[Server]:
    """Start one, and end it with the block.

    Args:
        log: a file for what it prints.
    """
    import vllm

    arguments = engine_arguments(
        vllm.__version__,
        planned=PLANNED | planned | {"model": folder, "skip_tokenizer_init": False},
        model=folder,
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    environment = os.environ | arguments.environment | {"VLLM_SERVER_DEV_MODE": "1"}  # weights over HTTP
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *arguments.command_line()],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", folder)
    try:
        _wait(server, process, log)
        server.count(0)
        yield server
    finally:
        # With the engine, which is a process of its own and would outlive a server that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(URLError, OSError):
            urlopen(server.url + "/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise ReplayError(
        "vLLM's server didn't start", expected=f"{server.url}/health within {PATIENCE} s", got=f"see {log}"
    )
