"""What a rollout engine sends back: an `Answer` with its `Tokens`; JSON, or a refusal in one of three forms.

OpenAI's      {"error": {"message": "...", "code": 404}}, or {"object": "error", "message": "..."}
FastAPI's     {"detail": "Not Found"}, or a list of what is wrong with which field
a stream's    «data: {...}» lines; whoever has the piece with the routes gives that alone
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.release_rules import Source
from npu_replay.routes.checks import Array

_MOST = 300  # characters of somebody else's words


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an answer says of one sequence; None or empty where it says nothing.

    Attributes:
        source: for messages: the release, the request, the field of the routes, and the known faults.
        payload: the routes, in whatever form.
        prompt_ids, output_ids: those that the engine was given and those that it sampled.
        prompt_tokens, completion_tokens: how many of each the engine counted.
        finish: the engine's word for why it ended: «stop», «length», «abort».
        weight_version: the engine's own.
    """

    source: Source
    payload: Any = None
    prompt_ids: Any = None
    output_ids: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str = ""
    weight_version: str | None = None

    aborts: ClassVar[tuple[str, ...]] = ("abort",)

    @property
    def ended(self) -> bool:
        """Did it end by itself? One that was aborted may have no rows."""
        return self.finish not in self.aborts


@dataclass(frozen=True)
class Tokens:
    """A sequence's ids; how many of them are the prompt's; how many more the caller took off its end."""

    ids: Array
    prompt: int
    taken_off: int

    @property
    def sampled(self) -> int:
        """How many the engine sampled."""
        return len(self.ids) + self.taken_off - self.prompt


def opened(found: Any, engine: str, expected: str, *, not_found: str = "") -> Any:
    """An answer as it can be looked into: text parsed, an object of OpenAI's client as its dict, and what is
    neither as it is.

    Args:
        found: whatever the caller has.
        engine: whose it is, for messages: «vLLM 0.33.0».
        expected: what was hoped for.
        not_found: what usually causes a 404.

    Raises:
        InvalidRoutes: it is no JSON, or the server's refusal, whose words are quoted.
    """
    if isinstance(found, (str, bytes, bytearray)):
        found = _parsed(found, engine, expected)
    elif hasattr(found, "choices") and callable(getattr(found, "model_dump", None)):
        found = found.model_dump()
    said = _refusal(found) if isinstance(found, Mapping) else ""
    if said:
        known = not_found if said == "Not Found" else ""
        raise InvalidRoutes(
            "the server refused the request",
            where=engine,
            expected=expected,
            got=f"«{' '.join(said[:_MOST].split())}»",
            cause=known or "the answer's HTTP status says so too, and wasn't looked at",
        )
    return found


def _parsed(text: str | bytes | bytearray, engine: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text[:40] if isinstance(text, str) else bytes(text[:40])
        began = shown.lstrip()[:1] in ("{", "[", b"{", b"[")
        raise InvalidRoutes(
            "the answer isn't JSON",
            where=engine,
            expected=f"{expected}, whole",
            got=f"{shown!r} ({type(error).__name__})",
            cause="an answer that was cut off on its way, or several in one text"
            if began
            else "a stream, whose pieces begin with «data:», or an error page of something between",
        ) from error


def _refusal(answer: Mapping[Any, Any]) -> str:
    """The server's own words, where this is an error and no answer."""
    if any(isinstance(one := answer.get(name), (list, Mapping)) and one for name in ("choices", "meta_info")):
        return ""
    for name in ("error", "detail", "message"):
        said = answer.get(name)
        if said:
            return _words(said)
    return ""


def _words(said: Any) -> str:
    if isinstance(said, Mapping):
        message = said.get("message", said.get("msg"))
        where = said.get("loc")
        place = f"{'.'.join(map(str, where))}: " if isinstance(where, (list, tuple)) else ""
        return f"{place}{message}" if isinstance(message, str) else str(said)
    if isinstance(said, list):
        return "; ".join(_words(one) for one in said[:8])
    return str(said)
