"""A gateway between trainer and vLLM, on loopback: it sends routes on in `nvext`, as NVIDIA Dynamo does."""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from engine_server import post


class Gateway:
    """`with Gateway(server.url) as url: post(url + path, body)`."""

    def __init__(self, behind: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(wrapped(json.loads(post(behind + self.path, body)), body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def wrapped(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The answer with routes and sampled ids moved to where Dynamo's engine_data has them."""
    (choice,) = answer["choices"]
    rows = np.load(io.BytesIO(base64.b64decode(choice.pop("routed_experts"))))
    envelope = {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": list(rows.shape),
        "dtype": str(rows.dtype),
        "start": request.get("routed_experts_prompt_start", 0),
    }
    ids = choice.pop("token_ids")
    return answer | {"nvext": {"engine_data": {"routed_experts": envelope, "completion_token_ids": ids}}}
