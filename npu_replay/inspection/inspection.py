"""inspect: decode what is in a file of routes, or refuse it with the error's own words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu_replay.inspection.load import LayerLoad, Loads
from npu_replay.inspection.sequences import Engine, Given, Sequence, opened, token_lists
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Says whether one sequence is right, and its sizes.

    Attributes:
        name: «completion 2», a store's key; empty where there is one only.
        problem: why it is refused, the whole message; empty where it isn't.
        tokens, rows, layers, topk: of its routes, and the rows that have one; 0 where it is refused.
        dtype, nbytes: of its ids.
        facts: the weights that chose, and the fingerprint of its tokens, where it has them.
    """

    name: str = ""
    problem: str = ""
    tokens: int = 0
    rows: int = 0
    layers: int = 0
    topk: int = 0
    dtype: str = ""
    nbytes: int = 0
    facts: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Sequence) -> Verdict:
        """Return the verdict on a sequence, without its routes."""
        routes = found.routes
        if routes is None:
            return cls(name=found.name, problem=found.problem)
        facts = [f"weights {routes.weight_version}"] if routes.weight_version is not None else []
        if routes.fingerprint is not None and found.named:
            facts.append(f"fingerprint {routes.fingerprint:#018x}")
        return cls(
            name=found.name,
            tokens=len(routes),
            rows=int(routes.recorded.sum()),
            layers=len(routes.layers),
            topk=routes.topk,
            dtype=str(routes.ids.numpy().dtype),
            nbytes=routes.ids.nbytes,
            facts=tuple(facts),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Inspection:
    """All that was found.

    Attributes:
        path: of the file or folder.
        what: it is, in words.
        verdicts: one a sequence.
        layers: the load of each layer, over all sequences that aren't refused.
        num_experts: of a layer.
        load: by layer, how often each expert was named, int64 [num_experts].
        unchecked: what couldn't be checked, and what it takes.
    """

    path: str
    what: str
    verdicts: tuple[Verdict, ...]
    layers: tuple[LayerLoad, ...]
    num_experts: int
    load: dict[int, Array]
    unchecked: tuple[str, ...]

    @property
    def bad(self) -> tuple[Verdict, ...]:
        """Return the sequences that are refused."""
        return tuple(verdict for verdict in self.verdicts if verdict.problem)

    @property
    def good(self) -> bool:
        """Is there a sequence, and is none refused?"""
        return bool(self.verdicts) and not self.bad

    def to_json(self) -> str:
        """Return all of it but the picture, for programs."""
        found: dict[str, Any] = {
            "ok": self.good,
            "path": self.path,
            "what": self.what,
            "num_experts": self.num_experts,
            "sequences": [asdict(verdict) for verdict in self.verdicts],
            "layers": [asdict(layer) for layer in self.layers],
            "unchecked": list(self.unchecked),
        }
        return json.dumps(found, indent=2)


def inspect(
    path: Path,
    *,
    config: Path | None = None,
    engine: Engine | None = None,
    version: str = "",
    prompt_ids: Path | None = None,
    output_ids: Path | None = None,
    start: int = 0,
    sample: str | None = None,
) -> Inspection:
    """Decode each sequence of a file or a folder, as `from_vllm`, `from_sglang` and `load` do.

    Args:
        path: see `sequences.KINDS`.
        config: the model's config.json, or its folder; an engine's rows can't be decoded without.
        engine: whose array or answer it is; None finds out, for an answer.
        version: the engine's release, for the causes of errors.
        prompt_ids, output_ids: JSON of token ids, one list, or a list a sequence.
        start: the token of the first row (`routed_experts_prompt_start`, `routed_experts_start_len`).
        sample: a store's key, or the number of an answer's completion: only that one.

    Raises:
        ReplayError: nothing can be looked into, or what else was given doesn't fit it. Why a sequence is
            refused is in the Inspection.

    >>> routes = npu_replay.RoutedExperts(ids=np.arange(8).reshape(2, 2, 2), layers=(0, 1), num_experts=8)
    >>> routes.save("routes")
    >>> inspect(Path("routes")).good
    True
    """
    given = Given(
        model=None if config is None else RoutedModel.from_config(config),
        engine=engine,
        version=version,
        prompts=token_lists(prompt_ids),
        outputs=token_lists(output_ids),
        start=start,
        sample=sample,
    )
    what, found = opened(path, given)
    loads = Loads()
    verdicts: list[Verdict] = []
    unchecked: dict[str, None] = {}
    for one in found:  # one at a time: a folder may be larger than the memory
        verdicts.append(Verdict.of(one))
        if one.routes is not None:
            loads.add(one.routes)
            unchecked |= dict.fromkeys(one.unchecked)
    return Inspection(
        path=str(path),
        what=what,
        verdicts=tuple(verdicts),
        layers=loads.figures(),
        num_experts=loads.num_experts,
        load=loads.counts,
        unchecked=tuple(unchecked),
    )
