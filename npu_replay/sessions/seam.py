"""The one thing that is replaced: what a router's top-k returns, inside one call of the router.

While a call is armed, the first top-k over the experts is answered by `Call.choose`: two-dimensional
scores, the last dimension as long as there are experts, k the router's, as many rows as the router was
given. (A router with one group calls another top-k before it, and the aux loss another one after.)
Every pass has one autograd shape: the ids are found without grad and the scores gathered, in a record too,
else a non-reentrant checkpoint finds other saved tensors in its recompute.

Two ways to catch that top-k, measured in docs/architecture.md:

- `torch.topk` and `torch.Tensor.topk` are answered through a thread-local while any session is open. Costs
  least. It can't see a name that somebody took earlier (`from torch import topk`).
- `Watch`, a TorchFunctionMode around the router, sees everything, at two microseconds an operation. It is
  on where scores are masked before the top-k (it has to see the masking), and as a safety net in the
  first call of each router.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from npu_replay.errors import RouterError
from npu_replay.sessions import compiler_names
from npu_replay.sessions.hooks import outside_modes


class Own(Protocol):
    """Runs the router's own top-k: int64 ids [rows, topk], of all rows or of those that are asked for."""

    def __call__(self, rows: torch.Tensor | None = None) -> torch.Tensor: ...


Choose = Callable[[Own], torch.Tensor]
"""Given the router's own choice (call it only if it is needed: it costs a top-k), the ids to use, int64."""

_MASKS = {torch.masked_fill, torch.Tensor.masked_fill, torch.where, torch.Tensor.where}


class _Armed(threading.local):
    def __init__(self) -> None:  # up to torch 2.10 dynamo takes a class attribute for a constant
        self.call: Call | None = None


_armed = _Armed()


def armed() -> Call | None:
    """The router's call that this thread is in, as long as its top-k hasn't come."""
    call = _armed.call
    return call if call is not None and call.ids is None else None


class Call:
    """One call of one router, from its forward pre-hook to its forward hook.

    Args:
        rows: how many rows the scores have.
        num_experts: how many columns.
        topk: the router's k.
        choose: gives the ids to use.
        masks: this router masks its scores before the top-k; needs `watch`.
        watch: also enter `Watch`, until the top-k was caught.
        verify: leave in `suspect` a flag, on the device, that the gathered scores can't be right.
        keeps: tokens over an expert's capacity are dropped by a second top-k, down the columns; it may not
            drop a chosen expert with a probability of exactly zero for a token that nobody sent there.
        spare: the router asks its top-k for so many more than it uses; they come last, and stay its own.
        compares: also find the router's own choice of all rows.
        given: the ids may be others than the router would choose.

    Afterwards `ids` are the ids that were used and `way` how the top-k was caught; None where none was, and
    then `seen` names what was called instead, as far as it was watched. `own_ids` are the router's own, where
    it was asked to compare. `inside` may be set to the frame that runs the router: an interrupt skips the
    forward hook, and a call whose frame has gone answers nothing any more.
    """

    __slots__ = (
        "_masked",
        "_outer",
        "choose",
        "compares",
        "given",
        "ids",
        "inside",
        "keeps",
        "masks",
        "num_experts",
        "own_ids",
        "rows",
        "seen",
        "spare",
        "suspect",
        "topk",
        "verify",
        "watching",
        "way",
    )

    def __init__(
        self,
        rows: int,
        num_experts: int,
        topk: int,
        choose: Choose,
        *,
        masks: bool = False,
        watch: bool = False,
        verify: bool = False,
        keeps: bool = False,
        spare: int = 0,
        compares: bool = False,
        given: bool = False,
    ) -> None:
        self.rows = rows
        self.num_experts = num_experts
        self.topk = topk
        self.choose = choose
        self.masks = masks
        self.watching = watch
        self.verify = verify
        self.keeps = keeps
        self.spare = spare
        self.compares = compares
        self.given = given
        self.inside: FrameType | None = None
        self.ids: torch.Tensor | None = None
        self.own_ids: torch.Tensor | None = None
        self.suspect: torch.Tensor | None = None
        self.way: str | None = None
        self.seen: list[str] = []
        self._masked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outer: Call | None = None

    def __enter__(self) -> Call:
        self._outer = _armed.call
        _armed.call = self
        if self.watching:
            _watch.enter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.watching:
            _watch.leave()
        _armed.call = self._outer
        self._masked.clear()

    def matches(self, scores: object, k: object, dim: object, kwargs: dict[str, Any]) -> bool:
        """Is this the routing decision? After it, and with `keeps`: is it the choice of whom to drop?"""
        return (
            isinstance(scores, torch.Tensor)
            and scores.dim() == 2
            and scores.shape[1] == self.num_experts
            and scores.shape[0] == self.rows
            and (
                (k == self.topk + self.spare and dim in (-1, 1))
                if self.ids is None
                else self.keeps and dim in (0, -2)
            )
            and kwargs.get("largest", True)
            and "out" not in kwargs
            and self._is_running()
        )

    def _is_running(self) -> bool:
        """Is the router's frame still among those that called this? If not, the call is left for good."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self.inside:
            frame = frame.f_back
        if frame is self.inside:
            return True  # also where none was set
        _armed.call = self._outer
        if self.watching and _watch.is_innermost():
            self.watching = False
            _watch.leave()
        return False

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k, once: later ones in this call are the router's own business."""
        if self.ids is not None:
            return self._drop(native, args, kwargs, self.ids)
        _armed.call = None
        if way == "guard" and self.watching and _watch.is_innermost():
            # What follows in the router runs as ever; its compiled functions would compile anew for a mode.
            # (From inside Watch it can't be left: torch pushes it back.)
            _watch.leave()
            self.watching = False
        scores = args[0] if args else kwargs["input"]
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        if type(scores).__name__ == "DTensor":
            raise RouterError(
                "the scores are a DTensor, which replay doesn't support",
                expected="plain tensors in the router",
                got=f"DTensor with placements {getattr(scores, 'placements', '?')}",
                cause="tensor parallelism by parallelize_module over the router; FSDP2 alone is fine",
            )

        values, ids = self._decide(native, scores, args[1:], rest)
        self.ids, self.way = ids[:, : self.topk] if self.spare else ids, way
        if self.keeps:
            _armed.call = self  # for the second top-k
        return torch.return_types.topk((values, ids))

    def _decide(
        self, native: Callable[..., Any], scores: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the top-k returns: values and ids, [rows, topk + spare]."""

        def own(rows: torch.Tensor | None = None) -> torch.Tensor:
            asked = scores.detach()  # half the price of no_grad()
            if rows is not None:
                asked = asked.index_select(0, rows)
            ids: torch.Tensor = native(asked, *args, **kwargs)[1]
            return ids[:, : self.topk] if self.spare else ids

        with outside_modes():
            ids = self._chosen(own)
        if self.spare:
            values, places = native(scores, *args, **kwargs)
            ids, source = torch.cat([ids, places[:, self.topk :]], dim=1), scores
        else:
            source = self._unmasked(scores)
            values = source.gather(1, ids)
        if self.verify:
            mask_unseen = self.masks and source is scores and not self.spare
            with outside_modes():
                self.suspect = _suspect(values.detach(), scores.detach(), mask_unseen=mask_unseen)
        return values, ids

    @contextlib.contextmanager
    def _outer_armed(self) -> Iterator[None]:
        """Let the call around this one answer, for once: it knows what was masked meanwhile."""
        outer = self._outer
        if outer is not None and outer.ids is None:
            outer._masked.extend(self._masked)
            _armed.call = outer
        try:
            yield
        finally:
            _armed.call = None

    def _chosen(self, own: Own) -> torch.Tensor:
        if not self.compares:
            return self.choose(own)
        self.own_ids = found = own()
        return self.choose(lambda rows=None: found if rows is None else found.index_select(0, rows))

    def note(self, read: Callable[[], torch.Tensor], way: str) -> None:
        """Take down what a router chose without a top-k that could be answered.

        Args:
            read: gives the ids, int64 [rows, topk]; what it does is not the router's doing any more.
            way: what chose.
        """
        _armed.call = None
        ids = read()
        self._noted(ids)
        self.ids, self.way = ids, way

    def _noted(self, ids: torch.Tensor) -> None:
        """Leaves in `suspect` a flag, on the device, that other ids were wanted, as in a recompute."""
        wanted = self._chosen(lambda rows=None: ids if rows is None else ids.index_select(0, rows))
        if wanted is not ids or self.verify:
            self.suspect = (wanted != ids).any()

    def _drop(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ids: torch.Tensor
    ) -> Any:
        """The choice of whom to drop, made anew for experts to which a token was lost that was sent there.

        Elsewhere it stays the router's own, also among equals. Where it doesn't, fewer positive scores than
        places are in the column, so none of them is dropped either way.
        """
        _armed.call = None
        scores = args[0] if args else kwargs.pop("input")
        kept = native(scores, *args[1:], **kwargs)
        if not scores.is_floating_point():
            return kept
        with outside_modes():
            found = scores.detach()
            chosen = torch.zeros_like(found, dtype=torch.bool).scatter(1, ids, True)
            lifted = found.masked_fill(chosen & (found == 0), least_positive(found.dtype))
            again = native(lifted, *args[1:], **kwargs)[1]
            lost = chosen.gather(0, kept[1]).sum(dim=0) < chosen.gather(0, again).sum(dim=0)
            places = torch.where(lost, again, kept[1])
        return torch.return_types.topk((scores.gather(0, places), places))

    def masked(self, result: torch.Tensor, source: torch.Tensor) -> None:
        """Remember which scores a masked tensor was made from: a replayed expert may lie in the mask."""
        self._masked.append((result, source))

    def _unmasked(self, scores: torch.Tensor) -> torch.Tensor:
        for result, source in reversed(self._masked):
            if result is scores:
                scores = source
        return scores


class Watch(TorchFunctionMode):
    """Sees every operation inside a router's call."""

    def enter(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def is_innermost(self) -> bool:
        return _get_current_function_mode() is self  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = _armed.call
        if call is None:
            return func(*args, **kwargs)
        call.seen.append(getattr(func, "__name__", ""))
        if call.seen[-1] == "topk":
            if call.matches(*_scores_k_dim(args, kwargs), kwargs):
                return call.answer(func, args, kwargs, "watch")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if call.masks and func in _MASKS:
            source = _mask_source(func, args, kwargs)
            if source is not None and source.shape == result.shape:
                call.masked(result, source)
        return result


_watch = Watch()


def _mask_source(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that was masked; none where it can't be told (a `where` between two tensors)."""
    if func is torch.where or func is torch.Tensor.where:
        named = [kwargs.get(name) for name in ("input", "self", "other")]
        tensors = [x for x in (*args, *named) if isinstance(x, torch.Tensor) and x.dtype != torch.bool]
        wide = [x for x in tensors if x.dim() > 0]
        return wide[0] if len(wide) == 1 else None
    source = args[0] if args else kwargs.get("input")
    return source if isinstance(source, torch.Tensor) else None


def _scores_k_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    count = len(args)
    return (
        args[0] if count else kwargs.get("input"),
        args[1] if count > 1 else kwargs.get("k"),
        args[2] if count > 2 else kwargs.get("dim", -1),
    )


class _Guarded:
    """One of torch's two names for top-k, answered through the armed call of this thread, if there is one."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.own_attribute = "topk" in vars(owner)  # Tensor's is inherited from its C base
        self.native = native = owner.topk

        def topk(*args: Any, **kwargs: Any) -> Any:
            call = _armed.call
            if call is None:
                if not guard.is_open:  # who wrapped it inside a block has laid it back after the block
                    self.lay_back()
                return native(*args, **kwargs)
            if not call.matches(*_scores_k_dim(args, kwargs), kwargs):
                return native(*args, **kwargs)
            return call.answer(native, args, kwargs, "guard")

        topk.__doc__ = native.__doc__
        self.answered = topk
        owner.topk = topk

    def lay_back(self) -> None:
        """Give the name back, unless it was wrapped meanwhile: then ours stays below and passes all on."""
        if self.owner.topk is not self.answered:
            return
        if self.own_attribute:
            self.owner.topk = self.native
        else:
            del self.owner.topk


class _Guard:
    """torch's two names for top-k, replaced while at least one session is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._holders = 0
        self._dynamo_knew = False
        self._names: list[_Guarded] = []

    def install(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            for left in self._names:
                left.lay_back()
            self._dynamo_knew = compiler_names.dynamo_knows()
            self._names = [_Guarded(torch), _Guarded(torch.Tensor)]
            compiler_names.teach_script(self._names[0].answered, "topk")
            self.is_open = True

    def remove(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            self.is_open = False
            for name in self._names:
                name.lay_back()
            compiler_names.unteach_script(self._names[0].answered, self._names[0].native, "topk")
            if not self._dynamo_knew:
                compiler_names.dynamo_forgets()


guard = _Guard()


def least_positive(dtype: torch.dtype) -> float:
    """A number above zero that is no weight, and that no device flushes to zero."""
    return max(2.0**-24 if dtype == torch.float16 else 0.0, torch.finfo(torch.float32).tiny)


def _suspect(values: torch.Tensor, scores: torch.Tensor, *, mask_unseen: bool) -> torch.Tensor:
    """A flag on the device: were these gathered from scores that somebody masked unseen?

    Masking with -inf shows as such values; masking by a product with 0 as exact zeros in
    rows whose best score is above zero.
    """
    flag = torch.isneginf(values).any()  # and not NaN: a step that diverged isn't ours to report
    if mask_unseen:
        flag = flag | ((values == 0).any(dim=1) & (scores.amax(dim=1) > 0) & (scores == 0).any(dim=1)).any()
    return flag
