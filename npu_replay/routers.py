"""Find the routers of a model and describe what the core has to know of each.

The core knows no product: a compat module registers a `RouterKind`. `find` asks the routers of the live model
each time, since a description made earlier could be out of date; which modules to ask is remembered.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import nn

from npu_replay.errors import RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routes.arguments import StageLabels

if TYPE_CHECKING:
    from npu_replay.sessions.timeline import Marks

Model: TypeAlias = "nn.Module | Sequence[nn.Module]"
"""Names what a block takes: a module, or the list of its virtual-pipeline chunks."""


class Handle(Protocol):
    """Removes what it stands for, such as a hook."""

    def remove(self) -> None: ...


Ids: TypeAlias = "Callable[[], tuple[torch.Tensor, torch.Tensor] | None]"
"""Returns the ids to be counted and the ids in use, [rows, topk] each; None outside a call."""


@dataclass(frozen=True)
class AuxLosses:
    """Describes the aux losses of one router.

    Attributes:
        follow: they count the ids that the router was given; otherwise its own choice. None where that
            isn't known: then they are always made to count what is asked for.
        recount: makes them count other ids until the handle is removed.
    """

    follow: bool | None
    recount: Callable[[Ids], Handle]

    def follow_the_call_of(self, router: nn.Module) -> bool:
        """Return whether the running call may count the ids that it was given; none are without grad."""
        return self.follow is not False and router.training and torch.is_grad_enabled()


@dataclass(frozen=True, kw_only=True)
class Router:
    """Describes one router of a model.

    Attributes:
        module: its `__call__` is where the top-k happens. Its first argument ends in the hidden dimension.
        num_experts: columns of its scores.
        topk: experts a token.
        layer: the global 0-based decoder layer; None where the module doesn't know: `find` then numbers it.
        shows: reads the router's own output: bool [rows, num_experts], the experts that it sends tokens to,
            or their ids, integers [rows, topk], in any order. None where the module itself uses the ids (a
            block without a router inside): then their use is followed (`seam/id_uses.py`).
        drops: tokens over an expert's capacity are dropped, so `shows` may show fewer than were chosen.
        masks: scores are masked before the top-k (group-limited routing).
        leaves: the number of experts that its own mask leaves unmasked in each row (group-limited routing:
            those of the chosen groups); 0 where it isn't known, which costs five operations a call.
        gathers: score rows per input row; above 1 only with Megatron 0.12's alltoall_seq.
        mend: changes the output of a router that was given ids ([rows, topk]), where later code could lose
            one of them.
        spare: the number of experts that its top-k returns beyond those it uses; they come last.
        aux_losses: None if it has none.
        row_order: the order of its rows from [batch, sequence]: "sequence" (s*b), "batch" (b*s), or None.
        bypass: why its top-k might never run, as the cause of an error; empty if nothing is known.
        path: its place in the model, filled in by `find`.
        depth: the number of decoder layers of the whole model, over all stages; 0 if it isn't known.
        whole: the labels of all routers of the model, on any stage, where its layers are counted otherwise
            than in a Hugging Face config; else empty.
    """

    module: nn.Module
    num_experts: int
    topk: int
    shows: Callable[[object], torch.Tensor] | None
    layer: int | None = None
    drops: bool = False
    masks: bool = True
    leaves: int = 0
    gathers: int = 1
    mend: Callable[[object, torch.Tensor], object] | None = None
    spare: int = 0
    aux_losses: AuxLosses | None = None
    row_order: str | None = None
    bypass: str = ""
    path: str = ""
    depth: int = 0
    whole: tuple[int, ...] = ()

    @property
    def label(self) -> int:
        """Return the layer, once `find` has numbered it."""
        if self.layer is None:
            raise RouterError("this router has no label yet: find() gives one", where=self.path)
        return self.layer


def as_map(shown: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the result of `Router.shows` as bool [rows, experts]; ids that are no expert's show none."""
    if shown.dtype == torch.bool:
        return shown
    ids = shown.long().where((shown >= 0) & (shown < num_experts), num_experts)
    none = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool, device=ids.device)
    return none.scatter(1, ids, True)[:, :num_experts]


class RouterKind:
    """Recognises one product's routers. Subclass it, and register an instance."""

    def may_be_router(self, module: nn.Module, path: str) -> bool:
        """Return whether `describe` is called for a module, by all but the values of its attributes.

        The answer is remembered while the model has the same modules in the same places (`ModuleTree`).
        """
        return True

    def describe(self, module: nn.Module, path: str) -> Router | None:
        """Describe `module`, or return None if it isn't a router of this kind to be replayed.

        Raises:
            RouterError: it is one, but can't be replayed.
        """
        raise NotImplementedError

    def labelled(self, chunk: ModuleTree, routers: list[Router]) -> list[Router]:
        """Label the routers of a chunk, where the chunk knows more than each of them."""
        return routers

    def accepts_none(self, chunks: Sequence[ModuleTree]) -> bool:
        """Return whether these may have no router: a pipeline stage of dense layers, by its config."""
        return False

    def check_chunks(self, chunks: Sequence[ModuleTree]) -> None:
        """Refuse chunks that aren't all that this rank has of its model."""

    def check_losses(self, chunk: nn.Module, call: Mapping[str, object]) -> None:
        """Refuse a call with these arguments whose loss can't count the experts of a replay."""

    def mark(self, chunk: nn.Module, routers: Sequence[Router], marks: Marks) -> Iterable[Handle]:
        """Attach hooks to a chunk that mark the recomputes which it runs outside backward."""
        return ()

    def variant(self, model: nn.Module) -> Callable[[], Mapping[str, object]]:
        """Return a function that gives, by name, the model's current variant, such as its active adapters."""
        return dict


_kinds: dict[str, RouterKind | Callable[[], RouterKind]] = {}


def register(name: str, kind: RouterKind | Callable[[], RouterKind]) -> None:
    """Make `find` recognise another product's routers. Registering a name again replaces it.

    Args:
        kind: a RouterKind, or a function that makes one when a model is first examined.
    """
    _kinds[name] = kind


def kinds() -> tuple[str, ...]:
    """Return the products whose routers are recognised."""
    return tuple(_kinds)


def _registered() -> list[RouterKind]:
    made = {name: kind if isinstance(kind, RouterKind) else kind() for name, kind in _kinds.items()}
    _kinds.update(made)
    return list(made.values())


def unregister(name: str) -> None:
    """Undo `register`."""
    _kinds.pop(name, None)


def check_losses(chunk: nn.Module, call: Mapping[str, object]) -> None:
    """Let every product refuse a call whose loss can't count the experts of a replay."""
    for kind in _registered():
        kind.check_losses(chunk, call)


def mark(chunk: nn.Module, routers: Sequence[Router], marks: Marks) -> list[Handle]:
    """Let every product mark what it runs again outside backward; return handles that remove the hooks."""
    return [handle for kind in _registered() for handle in kind.mark(chunk, routers, marks)]


def variant(model: nn.Module) -> Callable[[], dict[str, object]]:
    """Return a function that describes the model's current variant for every product."""
    asked = [kind.variant(model) for kind in _registered()]
    return lambda: {name: value for ask in asked for name, value in ask().items()}


PART_BY_PART = (
    "a pruned model, whose layers have numbers of their own. It goes part by part (R2; rows of an engine "
    "can't be read), a block for each router: `with contextlib.ExitStack() as stack: parts = [stack."
    "enter_context(npu_replay.record(router.module)) for router in npu_replay.routers.find([model])[0]]; "
    "model(batch)`, and npu_replay.replay(router.module, part.routes) likewise"
)


def check_alike(numbers: Mapping[str, tuple[int, int]]) -> None:
    """Refuse layers that differ in (top-k, number of experts): one RoutedExperts can't hold their ids."""
    for layer, ours in numbers.items():
        first, wanted = next(iter(numbers.items()))
        if ours != wanted:
            raise RouterError(
                "the layers differ in top-k or experts, which one RoutedExperts can't hold",
                where=layer,
                expected=f"top-{wanted[0]} of {wanted[1]} experts, as in {first}",
                got=f"top-{ours[0]} of {ours[1]}",
                cause=PART_BY_PART,
            )


def chunks_of(model: Model) -> list[nn.Module]:
    """Return the model chunks, from a module or a list of them."""
    single = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
    chunks: list[Any] = [model] if single or not isinstance(model, Iterable) else list(model)
    for chunk in chunks:
        RouterError.unless(
            isinstance(chunk, nn.Module), "a model chunk isn't a module", "torch.nn.Module", type(chunk)
        )
    return chunks


def labels_of(routers: Sequence[Router], here: Iterable[Router] = ()) -> StageLabels:
    """Return the labels of these routers; `here` are all of this rank."""
    labels, every = ([router.label for router in each] for each in (routers, here))
    return StageLabels(labels, routers[0].whole if routers else (), sorted(every))


def find(chunks: Sequence[nn.Module]) -> list[list[Router]]:
    """Find the routers of each model chunk, labelled by decoder layer and sorted by it.

    Raises:
        RouterError: no router (unless it is a pipeline stage of dense layers), one that can't be replayed, a
            label twice, or labels for some only.
    """
    by_chunk: list[list[Router]] = []
    kinds = _registered()
    trees = [ModuleTree.of(chunk) for chunk in chunks]
    for tree in trees:
        routers = list(_described(tree, kinds))
        for kind in kinds:
            routers = kind.labelled(tree, routers)
        by_chunk.append(routers)
    for kind in kinds:
        kind.check_chunks(trees)
    if not any(by_chunk) and not any(kind.accepts_none(trees) for kind in kinds):
        raise RouterError(
            "no router in this model",
            where=", ".join(type(chunk).__name__ for chunk in chunks) or "an empty list of chunks",
            expected=f"at least one router of {', '.join(_kinds) or 'a registered kind'}",
            got=0,
            cause=(
                "a dense model, a wrapper that hides the modules, or a model family that npu_replay doesn't "
                "know (docs/models.md lists those it does, docs/routers.md teaches it another)"
            ),
        )
    return _labelled(by_chunk)


def _described(tree: ModuleTree, kinds: Sequence[RouterKind]) -> Iterator[Router]:
    from npu_replay.routes.checks import MAX_EXPERTS  # here: importing npu_replay must not import it

    asked = (zip(tree.where(kind.may_be_router), itertools.repeat(kind)) for kind in kinds)
    inside: str | None = None  # the path of a router: modules inside it are none
    for (_, path, module), kind in heapq.merge(*asked, key=lambda entry: entry[0][0]):
        if inside is not None and f"{path}.".startswith(inside):
            continue
        router = kind.describe(module, path)
        if router is None:
            continue
        count = router.num_experts
        RouterError.unless(
            count <= MAX_EXPERTS,
            "the router has more experts than ids are kept for",
            expected=f"up to {MAX_EXPERTS}",
            got=count,
            cause="a layer of another kind described as a router",
            where=path or "the module itself",
        )
        inside = f"{path}." if path else ""
        yield replace(router, path=path)


def _labelled(by_chunk: list[list[Router]]) -> list[list[Router]]:
    everything = [router for routers in by_chunk for router in routers]
    numbered = [router for router in everything if router.layer is not None]
    if numbered and len(numbered) < len(everything):
        nameless = next(router for router in everything if router.layer is None)
        raise RouterError(
            "some routers know their decoder layer and some don't",
            where=nameless.path,
            expected="a layer number on every router, or on none",
            got=f"{len(numbered)} of {len(everything)} numbered",
            cause="routers of two products in one model, or set_layer_number() was not called",
        )
    if not numbered:
        count = itertools.count()
        by_chunk = [[replace(router, layer=next(count)) for router in routers] for routers in by_chunk]
    seen: dict[int, str] = {}
    cause = (
        "multi-token-prediction, a second tower or experts in the attention counted as decoder layers, the "
        "same pipeline stage given as two chunks, or a whole layer in PEFT's modules_to_save: name its "
        "router there, or its block of experts"
    )
    for router in (router for routers in by_chunk for router in routers):
        if router.label in seen:
            raise RouterError(
                "two routers say that they are in the same decoder layer",
                where=f"layer {router.label}",
                expected="each layer once",
                got=f"{seen[router.label]} and {router.path}",
                cause=cause,
            )
        seen[router.label] = router.path
    return [sorted(routers, key=lambda router: router.label) for routers in by_chunk]


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first tensor that a router is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RouterError("the router was called without a tensor", expected="hidden states", got=args)
