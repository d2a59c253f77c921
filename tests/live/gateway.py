"""A gateway between trainer and vLLM, on loopback: it sends routes on in `nvext`, as NVIDIA Dynamo does."""

from __future__ import annotations

import base64
import io
import json
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from json_server import post, serving


def gateway(behind: str) -> AbstractContextManager[str]:
    """The address of one: `with gateway(server.url) as url: post(url + path, body)`."""
    return serving(lambda path, body: wrapped(json.loads(post(behind + path, body)), body))


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
