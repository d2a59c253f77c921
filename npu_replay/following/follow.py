"""follow: record and replay by the tokens of each call, for loops that offer no place for either."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch

from npu_replay import routers
from npu_replay.errors import (
    CALLED_INSIDE,
    InvalidRoutes,
    MicroBatchError,
    ReplayError,
    RouterError,
    micro_batch,
    one_of,
)
from npu_replay.following.fed_sequences import (
    KEYWORDS,
    MODALITIES,
    FedSequences,
    carried_routes,
    fed_sequences,
)
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routers import Model, Router, labels_of
from npu_replay.routes.fingerprint import SampleKey, find_other_tokens, fingerprint
from npu_replay.routes.inputs import named, parameter_names
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RoutesByTokens
from npu_replay.seam import backward
from npu_replay.sessions.answering import Answering
from npu_replay.sessions.micro_batch import MicroBatch
from npu_replay.sessions.own_choice import OwnChoice
from npu_replay.sessions.record import micro_batch_routes
from npu_replay.sessions.route_source import RouteSource, check_fit
from npu_replay.sessions.session import Session, to_enter

logger = logging.getLogger(__name__)

_EVAL = "in eval mode"


def follow(
    model: Model,
    *,
    mode: Literal["R2", "R3"] = "R2",
    max_bytes: int = 4 * 2**30,
    eval_mode: bool = False,
    live_mismatch: bool = False,
    min_overlap: float | None = None,
) -> Following:
    """Record what `model` chooses without grad, and replay it with grad, whoever calls it.

        with npu_replay.follow(trainer.model):
            trainer.train()

    >>> with npu_replay.follow(model) as following:
    ...     with torch.no_grad():
    ...         output = model(batch)
    ...     model(batch).logits.mean().backward()
    >>> following.metrics()["recorded"], following.metrics()["replayed"]
    (2, 2)

    A call without grad records; one with grad replays. Each sequence is looked up by the fingerprint of its
    tokens and the digest of its images, videos and audio, so samples may be shuffled, packed and cut into new
    micro-batches. A call gives its tokens as input_ids [batch, sequence], with attention_mask or position_ids
    (padded on any side, or packed), by themselves or in one dict that is its first argument. Calls without
    grad that are no log-probs of the policy are left alone: those with past_key_values, cache or use_cache
    (generation), in eval mode, or with other PEFT adapters switched on than at the beginning (a reference
    pass by the same module). A pass in train mode for another figure (a KL between updates) belongs into
    `paused()`, or it becomes the new record; the first update that takes it says so in a WARNING.

    A rollout's routes (R3) come from `put`, or with the call: as the keyword routed_experts= (ms-swift) or
    rollout_expert_indices= (SkyRL), [batch, sequence, layers, topk], padded or packed as the ids are. It is
    removed before the model runs; such a call may have embeddings, too. The keyword sample_key=, one a
    sequence, is removed likewise: it is the key that was given to `put`, or in R2 a key of the caller's own.

    Args:
        model: the Hugging Face model that the loop calls, or the PeftModel, DDP or FSDP2 around it. No
            sequence or context parallelism.
        mode: "R2": calls without grad record what no rollout gave. "R3": nothing is recorded, and each call
            of the policy needs a rollout's routes, with grad or without; without them it is an error.
        max_bytes: routes held at a time, in host memory (some 400 bytes a token for 48 layers of top-8);
            above it the oldest are dropped, with a WARNING.
        eval_mode: calls in eval mode are recorded or replayed, too, for a loop that takes old log-probs so
            (OpenRLHF). Put evaluations into `paused()` then. Without it such a call takes no routes, also in
            "R3"; one WARNING says so where it had some.
        live_mismatch, min_overlap: see `replay`.

    Raises:
        ReplayError: on entering, if a router can't be replayed, or an adapter's state can't be read; in a
            call without input_ids, with holes in its mask or a part of a sequence, or with grad and a
            sequence that no call has recorded; on leaving, as `record` and `replay`.
    """
    one_of(mode, ("R2", "R3"), "mode")
    source = TokenRoutes(records_new=mode == "R2", max_bytes=max_bytes)
    own = OwnChoice(live_mismatch=live_mismatch, min_overlap=min_overlap)
    return to_enter(Following(model, source, own, eval_mode=eval_mode))


class Following(Session):
    """Records or replays every call of a model by its tokens, until the block ends or `close` is called.

    Attributes:
        left_alone: how many calls were left alone, by reason.
    """

    name = "follow"

    def __init__(self, model: Model, source: TokenRoutes, own: OwnChoice, *, eval_mode: bool) -> None:
        self._source = source
        self.left_alone = source.left_alone
        self._answering = Answering(source, own, lasts=True)
        super().__init__(model, self._answering)
        count = len(self.chunks)
        RouterError.unless(count == 1, "follow takes one model", "a module", f"{count} chunks")
        self._eval_mode = eval_mode
        self._paused = self._warned = self._has_rollouts = False

    def open(self) -> Following:
        """Begin, where no `with` can go around the loop."""
        return self.__enter__()

    def close(self) -> None:
        """End what `open` began."""
        self.__exit__(None, None, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave calls to the routers: an evaluation, a pass with other weights, a loss on other tokens.

        A call with grad (a loss on texts that nobody rolled out, as in PPO-ptx) is a micro-batch without
        routes: its recomputes choose as its forward did.
        """
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def put(self, routes: RoutedExperts, tokens: Any = None, *, sample_key: SampleKey = None) -> None:
        """Set a rollout's routes for these tokens (R3), to be replayed in calls with grad and without.

            for routes in npu_replay.from_vllm(output, config):
                following.put(routes)

        Args:
            routes: of one whole sequence; the last token may have no row.
            tokens: its ids, [tokens]; not needed where the routes have their fingerprint.
            sample_key: distinguishes samples of the same tokens; their calls pass the same key. Without it,
                the first call with these tokens and their images takes the routes.

        Raises:
            ReplayError: routes of other tokens or of another model; no tokens and no fingerprint; other
                routes of the same tokens that no update has taken yet.
        """
        if sample_key is not None and routes.fingerprint is not None:
            routes = routes.of_sample(sample_key)
        mark = routes.fingerprint if tokens is None else fingerprint(tokens, sample_key=sample_key)
        if mark is None:
            raise ReplayError("these routes don't say whose they are", expected="tokens=", got=routes)
        length = len(routes) if tokens is None else len(tokens)
        if misfit := find_other_tokens(len(routes), routes.fingerprint, length, mark):
            raise misfit.error(InvalidRoutes, "put")
        check_fit(routes, self.all_routers, self.all_routers, micro_batch(self.done))
        self._source.store.put(mark, routes, rollout=True)
        self._has_rollouts = True

    def metrics(self) -> dict[str, float]:
        """Return plain numbers for any tracker.

        These are calls (micro_batches), routers, seconds; sequences recorded and replayed so far, calls that
        carried their routes; sequences held now, dropped for max_bytes, replaced by others of the same
        tokens; calls left alone; live_mismatch if asked for; overlap as in `replay`.
        """
        sequences = self._source.sequences
        store = self._source.store
        figures = {name: sequences[name] for name in ("recorded", "replayed", "carried")}
        figures |= {"held": len(store), "held_bytes": store.bytes, "dropped": store.dropped}
        figures |= {"replaced": store.replaced, "left_alone": sum(self.left_alone.values())}
        return super().metrics() | figures

    def _check_complete(self) -> None:
        if self.done or not self.left_alone:
            super()._check_complete()

    def _chunk_begins(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        carried = next((kwargs[name] for name in KEYWORDS if kwargs.get(name) is not None), None)
        others = {name: value for name, value in kwargs.items() if name not in KEYWORDS}
        keys = others.pop("sample_key", None)
        fed = None if len(others) == len(kwargs) else (args, others)  # what the model is called with instead
        if backward.in_backward():
            return fed
        self._source.is_on = False  # an interrupt that left a forward has run no hook at its end
        names = parameter_names(self.chunks[0]) if args else []
        MicroBatchError.unless(
            len(args) <= len(names),
            "this call's arguments have no names",
            expected=f"at most {len(names)} without",
            got=len(args),
            cause="a wrapper: follow the model in it, or name them",
        )
        call = named(args, others, self.chunks[0])
        call = {name: value for name, value in call.items() if value is not None}
        # A reentrant checkpoint around the model runs the update's first pass without grad.
        grad = torch.is_grad_enabled() or bool(backward.enclosing(functions=True))
        is_native = grad and self._paused
        why = None if is_native else self._why_left_alone(call, grad)
        if why is None:
            with self._answering.shared.timed():
                self._source.look_up(call, keys, grad, carried, paused=is_native)
            self._source.is_on = True
            super()._chunk_begins(0, args, others)
        elif grad:
            raise MicroBatchError(
                f"a call with grad can't be followed {why}",
                where=micro_batch(self.done),
                cause="a reference pass or a generation that lacks torch.no_grad()",
            )
        else:
            self.left_alone[why] += 1
            if why == _EVAL and not self._warned:  # it may be a pass for old log-probs
                has_rollout = self._has_rollouts and self._source.has_rollout(call, keys)
                self._warned = carried is not None or has_rollout
                if self._warned:
                    logger.warning(
                        "[npu_replay] a call in eval mode has a rollout's routes and isn't replayed: it is "
                        "taken for an evaluation. If it takes old log-probs, they don't go with the update, "
                        "which is replayed: follow(model, eval_mode=True), and evaluations into paused()"
                    )
        return fed

    def _chunk_ends(self, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if backward.in_backward():
            return
        on = self._source.is_on
        self._source.is_on = False
        if on:
            super()._chunk_ends(chunk, args, output)

    def _why_left_alone(self, call: dict[str, Any], grad: bool) -> str | None:
        if self._paused:
            return "while paused"
        now = {"adapters of each sample": call.get("adapter_names")} | self._source.variant()
        if other := [name for name in now if now[name] != self._source.policy.get(name)]:
            return f"of another variant of the model ({', '.join(other)})"
        if "past_key_values" in call or call.get("cache") is not None or call.get("use_cache"):
            return "with a cache"
        if not (grad or self._eval_mode or self.chunks[0].training):
            return _EVAL
        return None


class TokenRoutes(RouteSource):
    """Finds the routes of each call's sequences by their tokens.

    Attributes:
        is_on: the running call is followed.
        left_alone: how many calls were not followed, by reason.
        variant, policy: what describes the model's variant, and what it said when the block opened.
        sequences: how many were recorded and replayed, and how many calls carried their routes.
    """

    why_other_rows = (
        "a model that drops or adds tokens inside (prompt tuning), or slices them behind its call "
        "(sequence parallelism)"
    )

    def __init__(self, *, records_new: bool, max_bytes: int) -> None:
        super().__init__()
        self.is_on = False
        self.left_alone: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.store = RoutesByTokens(max_bytes)
        self._records_new = records_new
        self._warned = False
        self._fed: FedSequences | None = None
        self._replayed = 0
        self._new: list[int] = []  # sequences of the running call that are to be recorded

    def enters(self, session: Session) -> None:
        super().enters(session)
        self.variant = routers.variant(self.chunks[0])
        self.policy = self.variant()
        for router in self.all_routers:
            if router.row_order == "sequence":
                raise RouterError(
                    "follow needs rows that are batch-major",
                    where=f"layer {router.label}",
                    expected="a model of transformers",
                    got=f"{type(router.module).__name__}, whose rows are sequence-major",
                    cause="a model of Megatron's: its pipelines see no token ids; use record and replay",
                )

    def answers(self, router: Router) -> bool:
        if not self.is_on and torch.is_grad_enabled():
            raise MicroBatchError(
                "a router runs with grad, but not through the __call__ of the model that is followed",
                where=f"layer {router.label}",
                cause=CALLED_INSIDE,
            )
        return self.is_on

    def look_up(self, call: dict[str, Any], keys: Any, grad: bool, carried: Any, *, paused: bool) -> None:
        """Find the routes of each sequence of a call, and note which sequences are to be recorded.

        A paused call is left to the routers: none of its rows has a route, and none is recorded.
        """
        number = self.timeline.ended[0]
        self._fed = None
        self._new = []
        self._replayed = 0
        try:
            if paused:
                self._fed = fed_sequences(call, self._placeholders)
                routes = self._without_routes(self._fed.rows)
            elif carried is None:
                routes = self._found(fed_sequences(call, self._placeholders, keys), grad)
            else:
                routes = carried_routes(carried, call, self._model, self._placeholders.get("padding", 0))
        except (MicroBatchError, InvalidRoutes) as error:
            raise error.at(micro_batch(number)) from None
        self.give(0, number, routes)
        self.records = bool(self._new)

    def has_rollout(self, call: dict[str, Any], keys: Any) -> bool:
        with contextlib.suppress(MicroBatchError):
            fed = fed_sequences(call, self._placeholders, keys)
            return any(self.store.get(mark)[1] for mark in fed.marks + fed.of_tokens)
        return False  # a call without token ids

    def ends(self, forward: MicroBatch) -> None:
        self.given.clear()
        fed = self._fed
        self.records = False
        if forward.has_raised:
            return
        if fed is None:
            self.sequences["carried"] += 1
            return
        self.sequences.update(recorded=len(self._new), replayed=self._replayed)
        if self._new:
            where = micro_batch(forward.number)
            rows = micro_batch_routes(forward.ids, list(self.routers[0]), where, {})
            MicroBatchError.unless(
                len(rows) == fed.rows,
                "the routers saw another number of rows than the model was called with",
                expected=fed.rows,
                got=len(rows),
                cause=self.why_other_rows,
                where=where,
            )
            for at in self._new:
                mark = fed.marks[at]
                self.store.put(mark, rows.sequence(*fed.spans[at], mark), rollout=False)

    def clear(self) -> None:
        super().clear()
        self.store.clear()
        self._fed = None
        self._new = []

    @functools.cached_property
    def _model(self) -> RoutedModel:
        return RoutedModel.of_module(self.chunks[0], list(self.routers[0]))

    @functools.cached_property
    def _placeholders(self) -> dict[str, int]:
        """Return the token ids that stand for images and the like, and for "padding".

        Looked up with the first call, since a trainer may set the model's padding id when it starts.
        """
        configs = [module.config for module in self.chunks[0].modules() if hasattr(module, "config")]
        names = [(kind, f"{kind}_token_{end}") for kind in MODALITIES for end in ("id", "index")]
        names.append(("padding", "pad_token_id"))
        tokens = [(kind, getattr(config, name, None)) for config in configs for kind, name in names]
        return {kind: token for kind, token in tokens if token is not None}

    def _found(self, fed: FedSequences, grad: bool) -> RoutedExperts:
        """Return the routes of a call's sequences in its rows; rows of padding and of new ones have none."""
        known = {}
        here = self.routers[0]
        renewed = 0
        self._fed = fed
        for at, (mark, (first, end)) in enumerate(zip(fed.marks, fed.spans, strict=True)):
            self.store.move(fed.of_tokens[at], mark)
            routes, rollout = self.store.get(mark, update=grad)
            if routes is not None and (rollout or grad):
                if other := find_other_tokens(len(routes), mark, end - first, mark):
                    raise other.error(MicroBatchError, f"sequence {at}")
                known[at] = routes
                renewed += grad and self.store.is_renewed(mark)
            elif routes is not None or not fed.padded[at]:
                if routes is None and (grad or not self._records_new):
                    raise self._unknown(at, fed)
                self._new.append(at)
        self._replayed = len(known)
        if renewed and not self._warned:
            self._warned = True
            logger.warning(
                "[npu_replay] a pass without grad between two updates has recorded %d sequences of this one "
                "anew, with other routes, and these are replayed. That is right if the pass took new old "
                "log-probs; put one for other figures (a KL, a metric) into paused()",
                renewed,
            )
        if not known:
            return self._without_routes(fed.rows)
        index = torch.full((fed.rows,), -1, device="cpu")
        begin = 0
        for at, routes in known.items():
            first = fed.spans[at][0]
            index[first : first + len(routes)] = torch.arange(begin, begin + len(routes), device="cpu")
            begin += len(routes)
        return RoutedExperts.concat(list(known.values()), labels_of(here)).take(index)

    def _without_routes(self, rows: int) -> RoutedExperts:
        here = self.routers[0]
        topk, experts = here[0].topk, here[0].num_experts
        return RoutedExperts.unrecorded(rows, layers=labels_of(here), topk=topk, num_experts=experts)

    def _unknown(self, at: int, fed: FedSequences) -> MicroBatchError:
        known = sum(self.store.get(mark)[0] is not None for mark in fed.marks)
        expected = "each sequence of an update to have been recorded before, or to come from put()"
        cause = (
            "no pass for old log-probs came before this update (TRL leaves it out where each update follows "
            "its own generation: then there is nothing to replay), or it ran in eval mode: follow(model, "
            "eval_mode=True); the text was cut or extended in between, it has another image, or one that is "
            "padded to its batch, another rank recorded it, max_bytes is too small, or it is a loss on other "
            "texts (ptx, SFT), which belongs into paused()"
        )
        if not self._records_new:
            expected = f"{KEYWORDS[0]}= with each call of the policy, or put() before it"
            cause = (
                "the engine isn't asked for routes (vLLM: enable_return_routed_experts), or one sample has "
                "none (ms-swift then hands on nobody's); TRL's mask_truncated_completions=True, which hides "
                "an answer from the call; or it is an evaluation, which belongs into paused()"
            )
        first, end = fed.spans[at]
        alone = dict(self.left_alone) or "none"
        return MicroBatchError(
            "no routes are known for this sequence",
            where=f"sequence {at} ({end - first} tokens)",
            expected=expected,
            got=f"{known} of {len(fed.marks)} known; {len(self.store)} held, {self.store.dropped} dropped "
            f"for max_bytes={self.store.max_bytes}, calls left alone: {alone}",
            cause=cause,
        )
