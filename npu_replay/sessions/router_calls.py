"""The calls of one router in a session, from its pre-hook to its forward hook.

A model has a hundred routers, and an accelerator waits for what the host does around each. So what the calls
of a router have in common is worked out when the block opens, and what those of a micro-batch have in common
when it begins.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from npu_replay import routers
from npu_replay.errors import MicroBatchError, RecomputeError, RouterError, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions import backward, seam
from npu_replay.sessions.capacity import CapacityCall
from npu_replay.sessions.hooks import Hook
from npu_replay.sessions.masks import Path
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Forward, Marks, Timeline

if TYPE_CHECKING:
    from npu_replay.sessions.session import Session

FEW = 2**13
"""Up to so many ids a router gets the very tensor, as a copy would cost more than all else: 64 kB."""

_MOST_MASKED = 10_000
"""Of so many micro-batches at most is kept where their masks were, for their recomputes."""

_is_batched = torch._C._functorch.is_batchedtensor


class RouterCalls:
    """What begins and ends the calls of one router.

    Attributes:
        narrow: the dtype in which its ids are kept.
        block: what the block has to undo, by which its calls are told.
    """

    def __init__(self, session: Session, router: Router, chunk: int, marks: Marks) -> None:
        self._session = session
        self._prepare, self._witness = session._prepare, session._witness
        self._choose, self._choose_again = session._choose, session._choose_again
        self._frees = backward.TELLS_REGIONS and not session.foreign and not router.masks
        self._chunk = chunk
        self._depth = 3 if session.errors_wait else 2  # of the module's __call__; Hook's is between
        self._marks = marks
        self._timeline = session._timeline
        self._kind = router.call or (CapacityCall if router.drops else seam.Call)
        self._is_block = router.shows is None
        self._mend = router.mend if session.foreign else None
        self._ways: dict[bool, str | None] = {}
        """How its top-k was caught last time in this block, in eval mode and in training: saves the net."""
        self._paths: dict[tuple[str, ...], Path] = {}
        self._masked: dict[int, Any] = {}
        """Where the masks were in each of the last micro-batches."""
        self.last: Hook | None = None
        """The hook behind all others: that which ends the call, or, where others come later, `leaves`."""
        self._behind: Hook | None = None
        self._ended: tuple[object, seam.Call] | None = None
        """The call that has just ended, and its output, where hooks of others come later."""
        self.block = session._undo
        self.router = router
        self.label = router.label
        self.narrow = narrow_dtype(router.num_experts)

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The router's forward begins: its top-k is answered from now on."""
        started = time.perf_counter()
        session, router = self._session, self.router
        hidden = args[0] if args and isinstance(args[0], torch.Tensor) else hidden_states(args, kwargs)
        if _is_batched(hidden):
            raise _under_vmap(router)
        rows = hidden.numel() // hidden.shape[-1] * router.gathers
        number = self._marks.take_announced(router.module)
        if number is None and backward.in_backward():
            number = self._timeline.recomputed(self._chunk, self.label)
        if number is None and not session._answers(router):
            return
        expected = self._ways.get(router.module.training)
        call = self._kind(
            rows,
            router.num_experts,
            router.topk,
            self._choose if number is None else self._choose_again,
            masks=router.masks,
            watch=router.masks or expected != "guard",
            given=session.foreign,
            paths=self._paths,
        )
        call.expected, call.counts, call.chooses_itself = expected, self._is_block, not session.foreign
        call.follows = self._is_block and self._witness.follows(self.label)
        if number is None:
            call.forward, enclosed = self._live()
            call.free = self._frees and not enclosed
            if call.forward.checked:
                self._paths.clear()
                call.follows = self._is_block
            elif rows * router.topk <= FEW and not torch.is_inference_mode_enabled():
                call.keeps = False
            call.routes = self._prepare(router, call.forward, rows, hidden.device)
        else:
            call.number = number
            if call.made is not None:
                call.made.used = self._masked.get(number)
            call.routes = self._again(number, rows, hidden.device)
        if next(reversed(router.module._forward_hooks.values())) is not self.last and not self._is_block:
            self._look_behind()
        call.owner = self
        call.inside = sys._getframe(self._depth)
        call.begin()
        session._seconds += time.perf_counter() - started

    def ends(self, args: tuple[Any, ...], output: object) -> object:
        """The router's forward is over; what this returns takes the place of the output, if it isn't None."""
        call = seam.running(self)
        if call is None:
            return None  # its beginning was refused
        started = time.perf_counter()
        call.end()
        mended = None
        if output is not None:  # else the router raised, or its recompute was stopped early
            if call.way != call.expected:
                self._ways[self.router.module.training] = call.way
            if call.forward is not None:
                self._witness.saw(self.router, call.forward, call, output)
                if call.made is not None and call.made.used is not None:
                    self._masked[call.forward.number] = call.made.used
                    if len(self._masked) > _MOST_MASKED:
                        del self._masked[next(iter(self._masked))]
            else:
                self._note_again(call, output)
            if self._mend is not None and call.ids is not None:
                mended = self._mend(output, call.ids)
            if self._behind is not None:
                self._ended = (output if mended is None else mended), call
        elif call.forward is None and self._is_block:
            self._witness.saw_stopped(self.router, call.number, call)
        self._session._seconds += time.perf_counter() - started
        return mended

    def leaves(self, args: tuple[Any, ...], output: object) -> None:
        """The hooks of others are through with the output too, and may have made another of it."""
        (ours, call), self._ended = self._ended or (output, None), None
        if output is None or output is ours or call is None or call.ids is None:
            return
        again = call.forward is None
        number = call.number if again else call.forward.number
        self._witness.saw_last(self.router, number, call.ids, output, again=again)

    def _look_behind(self) -> None:
        """Hang a hook behind those of others, which were there before the block or have come since."""
        module, session = self.router.module, self._session
        if self._behind is None:
            self._behind = Hook(self, session._may_wait(RouterCalls.leaves), module)
            session._undo.callback(self._behind.take_off)
        self._behind.take_off()
        module.register_forward_hook(self._behind)
        self.last = self._behind

    def _live(self) -> tuple[Forward, bool]:
        """The forward that this call belongs to, and whether anything may run the call again."""
        forward, label = self._timeline.live(self._chunk), self.label
        if label in forward.called:
            raise called_again(self.router, forward, self._timeline)
        forward.called.add(label)
        around = self._timeline.enclosing(forward)
        if (foreseen := self._marks.take_foreseen(self.router.module)) is not None:
            around = [*around, foreseen]
        if around:
            self._session._pending.expect((label, forward.number), around)
        return forward, bool(around)

    def _again(self, number: int, rows: int, device: torch.device) -> torch.Tensor:
        """The ids of the call that this one is the recompute of."""
        ids = self._session._again(self.router, number, device)
        if len(ids) != rows:
            raise RecomputeError(
                "the recompute has another number of tokens than its forward",
                where=micro_batch(number, self.label),
                expected=f"{len(ids)} rows",
                got=rows,
                cause="a forward of something else that is run from a gradient hook",
            )
        self._session._pending.ran((self.label, number))
        return ids

    def _note_again(self, call: seam.Call, output: object) -> None:
        if call.way is None:
            raise RecomputeError(
                "the recompute of this router never reached its top-k",
                where=micro_batch(call.number, self.label),
                cause=routers.explained(self.router, call.seen)
                or "a recompute that takes another path than the forward",
            )
        else:
            self._witness.saw_again(self.router, call.number, call, output)


def called_again(router: Router, forward: Forward, timeline: Timeline) -> MicroBatchError:
    """The error for a router that a forward calls several times: its passes have no columns of their own."""
    return MicroBatchError(
        "the router is called again before the forward of the model that was passed has ended",
        where=micro_batch(forward.number, router.label),
        expected="one call of each router in one __call__ of the model",
        got="a second call",
        cause=f"{CALLED_INSIDE}; Megatron's overlap_moe_expert_parallel_comm does so too"
        if forward is timeline.bypassed
        else "a looped model, which runs some layers several times in one forward (Inkling-2): it can't be "
        "replayed; a model that runs one sequence after another; two layers that share one router; or a "
        "graph of before this block that MindSpeed's moe_fb_overlap runs again in it",
    )


def _under_vmap(router: Router) -> RouterError:
    return RouterError(
        "the router runs under vmap, where its rows can't be told apart",
        where=f"layer {router.label} ({router.path or 'the module itself'})",
        expected="hidden states [..., hidden]",
        got="a batched tensor of torch.vmap",
        cause="torch.vmap, torch.func.jacrev or the like around the model; loop over the batch instead",
    )


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a router is called with: the first tensor among its arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RouterError("the router was called without a tensor", expected="hidden states", got=args)
