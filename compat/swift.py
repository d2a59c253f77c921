"""Adds R2 and R3 to ms-swift's Hugging Face trainer, each by a name among its callbacks.

Its collate has the engine's routes, but 4.6 cuts them to the width of the completions, and shifts those
without their last token where it pads on the left. So they are laid out anew, as the ids are; the callback
follows the model.

Asks:     when the trainer is imported, the collate's name and arguments.
Changes:  that collate; the table of callbacks, which gets `npu_replay_R2` and `npu_replay_R3`.
Undone:   by `npu_replay.uninstall()`.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from npu_replay.compat import engines
from npu_replay.compat.patching import import_hook, known_names
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError
from npu_replay.following.fed_sequences import KEYWORDS
from npu_replay.following.follow import follow
from npu_replay.routes.fingerprint import find_other_length
from npu_replay.routes.places import Places

logger = logging.getLogger(__name__)

TRAINER = "swift.rlhf_trainers.grpo_trainer"
CALLBACKS = "swift.callbacks.mapping"
_COLLATE = "collate_to_grpo_micro_batch"
_ROUTES = KEYWORDS[0]
_WHAT = "routing replay of ms-swift's Hugging Face trainer"
_patches = Patches(_WHAT)
_chosen: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # callbacks that still train


def install() -> None:
    import_hook.when_imported(TRAINER, _WHAT, _wrap)
    import_hook.when_imported(CALLBACKS, _WHAT, _register)


def _wrap(module: Any) -> None:
    known_names.check(module, {_COLLATE: ("samples", "template")}, "trainer of ms-swift", "ms-swift")
    _patches.wrap(module, _COLLATE, _collated, "a rollout's routes are laid out as the ids are")


def _register(module: Any) -> None:
    table: dict[str, Any] = module.callbacks_map
    ours = {f"npu_replay_{mode}": functools.partial(_callback, mode) for mode in ("R2", "R3")}
    table.update(ours)

    def undo() -> bool:
        return None not in [table.pop(name, None) for name in ours]

    _patches.add(Change(f"{CALLBACKS}.callbacks_map", "the callbacks " + " and ".join(ours), undo))


def _callback(mode: Literal["R2", "R3"], args: Any, trainer: Any) -> Any:
    """Return a callback of a trainer, as ms-swift makes them."""
    from swift.callbacks import TrainerCallback

    if mode == "R3":
        engines.check("ms-swift", args)

    class Replay(TrainerCallback):  # type: ignore[misc]
        """Follows the policy as long as the training lasts."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.following = follow(known["model"], mode=mode).open()
            routers = int(self.following.metrics()["routers"])
            logger.info("[npu_replay] %s on %d routers, with ms-swift's trainer", mode, routers)

        def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.following.close()
            _chosen.pop(self, None)

    callback = Replay(args, trainer)
    _chosen[callback] = mode
    return callback


def _collated(original: Callable[..., Any], samples: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    inputs, batch = original(samples, *args, **kwargs)
    if _ROUTES in inputs and _chosen:  # absent for all if one sample has none
        if "R2" in _chosen.values():
            raise ReplayError(
                "npu_replay_R2 replays its own record, and the rollout sends other routes",
                where="ms-swift's callbacks",
                expected="vllm_engine_kwargs without enable_return_routed_experts",
                got="samples with routed_experts",
                cause="R3 is meant: --callbacks npu_replay_R3",
            )
        inputs[_ROUTES] = laid_out([sample.routed_experts for sample in samples], inputs)
    return inputs, batch


def laid_out(routes: Sequence[Any], call: Mapping[str, Any]) -> torch.Tensor:
    """Return the routes of a call's sequences: int32 [batch, sequence, layers, topk], zeros elsewhere.

    Args:
        routes: of each sequence, one at least, [tokens, layers, topk], perhaps without the last token's.
        call: what the model will be called with, padded or packed.

    Raises:
        InvalidRoutes: another number of rows than tokens.
        MicroBatchError: the call doesn't tell its sequences, or has fewer.
    """
    places = Places.of(call)
    if len(places.spans) < len(routes):
        raise MicroBatchError(
            "the batch has fewer sequences than samples", expected=len(routes), got=len(places.spans)
        )
    tensors = [torch.as_tensor(ids, dtype=torch.int32, device="cpu") for ids in routes]
    tensors = [ids[0] if ids.dim() == 4 and len(ids) == 1 else ids for ids in tensors]
    out = torch.zeros(places.real.size, *tensors[0].shape[1:], dtype=torch.int32, device="cpu")
    for number, (rows, (first, end)) in enumerate(zip(tensors, places.spans, strict=False)):
        where = f"sample {number} of the micro-batch"
        wrong_length = find_other_length(len(rows), end - first)
        if wrong_length is not None:
            raise wrong_length.error(InvalidRoutes, where)
        out[first : first + len(rows)] = rows
    return out.view(*places.real.shape, *out.shape[1:]).to(call["input_ids"].device)
