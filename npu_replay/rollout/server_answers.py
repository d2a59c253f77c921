"""Reads the answers of rollout engines: an `EngineAnswer` makes routes by the same steps for every engine.

A server may also refuse, in one of three forms:

OpenAI's      {"error": {"message": "...", "code": 404}}, or {"object": "error", "message": "..."}
FastAPI's     {"detail": "Not Found"}, or a list of fields with what is wrong with each
a stream's    «data: {...}» lines, of which only the piece with the routes is accepted
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from npu_replay.errors import InvalidRoutes, quoted
from npu_replay.rollout.admit import Missing, admit
from npu_replay.rollout.envelope import is_envelope
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

_SAID = 300  # characters of a server's words


@dataclass(frozen=True)
class Tokens:
    """Holds a sequence's ids, how many are the prompt's, and how many the caller removed from its end."""

    ids: Array
    prompt: int
    taken_off: int

    @property
    def sampled(self) -> int:
        """Return the number of tokens that the engine sampled."""
        return len(self.ids) + self.taken_off - self.prompt


@dataclass(frozen=True, kw_only=True)
class EngineAnswer(ABC):
    """Holds the fields of one sequence's answer; `routes` decodes them, after a subclass reads the rows.

    Attributes:
        prompt_ids, output_ids: the ids that the engine was given and that it sampled, in any form.
        prompt_tokens, completion_tokens: the engine's counts of each.
        unbilled: number of prompt tokens that `prompt_tokens` may leave out.
        finish: the engine's word for why it ended: «stop», «length», «abort».
        weight_version: the engine's own, if it is that of all rows.
    """

    source: Source
    payload: Any = None
    prompt_ids: Any = None
    output_ids: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    unbilled: int = 0
    finish: str = ""
    weight_version: str | None = None

    aborts: ClassVar[tuple[str, ...]] = ("abort",)
    arguments: ClassVar[tuple[str, str]] = ("prompt_token_ids", "output_token_ids")
    """The decoder's names for the token ids that its caller gives."""
    asks: ClassVar[str] = ""
    """The request option that puts the ids into the answer."""

    @property
    def ended(self) -> bool:
        """Return whether the request ended by itself; one that was aborted may have no rows."""
        return self.finish not in self.aborts

    def routes(
        self,
        model: RoutedModel,
        prompt: Any = None,
        output: Any = None,
        start: int = 0,
        missing: Missing = "error",
        weight_version: int | str | None = None,
    ) -> RoutedExperts:
        """Decode and check the routes; the arguments are those of `from_vllm` and `from_sglang`."""
        tokens = self.tokens(prompt, output)
        rows = self.rows(model, tokens, start, missing)
        routes = admit(
            np.zeros((0, model.num_layers, model.topk), np.uint8) if rows is None else rows,
            model=model,
            tokens=tokens.ids,
            source=self.source,
            start=start,
            ended=self.ended and rows is not None,
            surplus=tokens.taken_off,
            missing=missing,
            weight_version=self.weight_version if weight_version is None else weight_version,
        )
        return self.trusted(routes, tokens, missing)

    @abstractmethod
    def rows(self, model: RoutedModel, tokens: Tokens, start: int, missing: Missing) -> Array | None:
        """Read the rows from `start`, [rows, columns, topk], also of removed tokens; None if none is due."""

    def trusted(self, routes: RoutedExperts, tokens: Tokens, missing: Missing) -> RoutedExperts:
        """Remove the routes of rows that the engine has computed again."""
        return routes

    def tokens(self, prompt: Any, output: Any) -> Tokens:
        """Check the caller's token ids against the answer's; without the caller's, take the answer's."""
        ids, theirs = self._both(0, prompt, self.prompt_ids)
        if theirs is not None and not np.array_equal(ids, theirs):
            raise self.other_tokens(0, f"{len(theirs)} ids, as in the answer", f"{len(ids)} others")
        if self.prompt_tokens is not None and len(ids) - self.prompt_tokens not in (0, self.unbilled):
            raise self.other_tokens(0, f"{self.prompt_tokens} ids", len(ids))
        sampled, theirs = self._both(1, output, self.output_ids)
        # The engine may have run more tokens than the caller kept: a stop string is cut off, say.
        ran = len(sampled) if self.completion_tokens is None else self.completion_tokens
        if theirs is not None and self.completion_tokens in (None, len(theirs)):
            ran = len(theirs)
            if not np.array_equal(sampled, theirs[: len(sampled)]):
                # A stream's last output has only the last ids, and an aborted one's may have none.
                is_last = self.completion_tokens is None and (ran > 0 or not self.ended)
                if not is_last or not np.array_equal(sampled[len(sampled) - ran :], theirs):
                    raise self.other_tokens(
                        1, f"{ran} ids, as in the answer, or fewer off their end", f"{len(sampled)} others"
                    )
                ran = len(sampled)
        if ran < len(sampled):
            raise self.other_tokens(1, f"{ran} ids", len(sampled))
        return Tokens(np.concatenate([ids, sampled]), len(ids), ran - len(sampled))

    def _both(self, which: Literal[0, 1], ours: Any, theirs: Any) -> tuple[Array, Array | None]:
        """Return the ids to use, and the answer's own, if it has them."""
        source = replace(self.source, field=self.arguments[which])
        if ours is None and theirs is None:
            raise source.error(
                Symptom.SHAPE,
                f"the answer hasn't got the {('prompt', 'sampled')[which]} token ids",
                f"{self.asks}{source.field}= here",
                "neither",
            )
        ids = token_ids(theirs if ours is None else ours, source)
        return ids, ids if ours is None else None if theirs is None else token_ids(theirs, source)

    def other_tokens(self, which: Literal[0, 1], expected: object, got: object) -> InvalidRoutes:
        """Make the error about token ids, of the prompt or sampled, that aren't the engine's."""
        source = replace(self.source, field=self.arguments[which])
        return source.error(
            Symptom.TOKENS,
            f"the token ids given here aren't those that the engine {('ran', 'sampled')[which]}",
            expected,
            got,
        )


def opened(answer: Any, engine: str, expected: str, *, not_found: str = "") -> Any:
    """Return an answer as a Mapping if possible: parsed text, or the dict of an OpenAI client's object.

    `expected` are the accepted forms, `not_found` is the usual cause of a 404, both for messages. Raises
    InvalidRoutes for text that isn't JSON, and for the server's refusal, which it quotes.
    """
    if isinstance(answer, (str, bytes, bytearray)) and not is_envelope(answer):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise InvalidRoutes(
                "the answer isn't JSON",
                where=engine,
                expected=f"{expected}, whole",
                got=f"{answer[:40]!r} ({type(error).__name__})",
                cause="an answer that was cut off on its way; several in one text; a stream, whose pieces "
                "begin with «data:»; an error page of something between",
            ) from error
    elif hasattr(answer, "choices") and callable(getattr(answer, "model_dump", None)):
        answer = answer.model_dump()
    if is_envelope(answer):  # a gateway passed it on alone
        return {"choices": [{"routed_experts": answer}]}
    if not isinstance(answer, Mapping):
        return answer
    answered = any(
        isinstance(part := answer.get(name), (list, Mapping)) and part for name in ("choices", "meta_info")
    )
    refusal = next((words for name in ("error", "detail", "message") if (words := answer.get(name))), None)
    if refusal is not None and not answered:
        words = refusal.get("message", refusal) if isinstance(refusal, Mapping) else refusal
        raise InvalidRoutes(
            "the server refused the request",
            where=engine,
            expected=expected,
            got=f"«{quoted(words, _SAID)}»",
            cause=(words == "Not Found" and not_found)
            or "the answer's HTTP status says so too, and wasn't looked at",
        )
    return answer
