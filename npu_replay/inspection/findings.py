"""Hold the findings of `npu-replay inspect`: a verdict on each sequence, and the load of each layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from npu_replay.errors import ReplayError
from npu_replay.options import message
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.tables import Part, Table

_REFUSED = 20
"""The number of refused sequences that are named one by one."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Describes one sequence: whether it is right, and its sizes.

    Attributes:
        name: «completion 2», a store's key; empty where there is one only.
        problem: the whole message of its error; empty if it isn't refused.
        tokens, rows, layers, topk: of its routes; `rows` have a route. 0 where it is refused.
        facts: the version of the weights, and the fingerprint of its tokens, where it has them.
    """

    name: str = ""
    problem: str = ""
    tokens: int = 0
    rows: int = 0
    layers: int = 0
    topk: int = 0
    facts: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Inspection:
    """Collects all findings. Each sequence is counted and released: a folder may be larger than the memory.

    Attributes:
        what: the kind of contents, in words.
        num_experts: of a layer, the most of any sequence.
        load: by layer, how often each expert was named, int64 [num_experts].
        rows: by layer, how many have a route.
        unchecked: what couldn't be checked, and what that takes.
    """

    path: str
    what: str = ""
    verdicts: list[Verdict] = field(default_factory=list)
    num_experts: int = 0
    load: dict[int, Array] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)

    def add(
        self,
        read: Callable[[], RoutedExperts],
        *,
        name: str = "",
        named: bool = True,
        unchecked: Iterable[str] = (),
    ) -> None:
        """Decode a sequence by `read` and count it, or note why it is refused.

        Args:
            named: its token ids are known, so that its fingerprint means something.
            unchecked: what can't be checked, and what that takes.
        """
        try:
            routes = read()
        except ReplayError as error:
            self.refuse(name, error)
            return
        self.unchecked += [words for words in unchecked if words not in self.unchecked]
        self.num_experts = max(self.num_experts, routes.num_experts)
        recorded = routes.recorded.numpy()
        ids = routes.ids.numpy()
        rows = int(recorded.sum())
        for column, layer in enumerate(routes.layers):
            counted = np.bincount(ids[recorded, column].ravel(), minlength=self.num_experts)
            before = self.load.get(layer, np.zeros(0, np.int64))
            self.load[layer] = np.pad(before, (0, len(counted) - len(before))) + counted
            self.rows[layer] = self.rows.get(layer, 0) + rows
        facts = [f"weights {routes.weight_version}"] if routes.weight_version is not None else []
        if routes.fingerprint is not None and named:
            facts.append(f"fingerprint {routes.fingerprint:#018x}")
        self.verdicts.append(
            Verdict(
                name=name,
                tokens=len(routes),
                rows=rows,
                layers=len(routes.layers),
                topk=routes.topk,
                facts=tuple(facts),
            )
        )

    def refuse(self, name: str, error: ReplayError) -> None:
        self.verdicts.append(Verdict(name=name, problem=message(error)))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Return the load of each layer, over all sequences that aren't refused.

        `busiest` was named most, in `busiest_share` of all; `entropy` of the shares is in bits.
        """
        layers = []
        for layer, counts in sorted(self.load.items()):
            shares = counts[counts > 0] / max(1, counts.sum())
            about: dict[str, Any] = {"layer": layer, "rows": self.rows[layer], "used": len(shares)}
            about |= {"busiest": int(counts.argmax()), "busiest_share": float(shares.max(initial=0))}
            layers.append(about | {"entropy": abs(float(-(shares * np.log2(shares)).sum()))})
        return layers

    @property
    def bad(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.problem]

    @property
    def good(self) -> bool:
        return not self.bad

    def to_json(self) -> str:
        findings = {
            "ok": self.good,
            "path": self.path,
            "what": self.what,
            "num_experts": self.num_experts,
            "sequences": [asdict(verdict) for verdict in self.verdicts],
            "layers": self.layers,
            "unchecked": self.unchecked,
        }
        error = {} if self.good else {"error": self.bad[0].problem}
        return json.dumps(error | findings, indent=2)

    def parts(self) -> Iterator[Part]:
        yield f"{self.path}: {self.what}"
        if seen := [verdict for verdict in self.verdicts if verdict.layers]:
            first = seen[0]
            experts = max(1, self.num_experts)
            tokens = sum(verdict.tokens for verdict in seen)
            rows = sum(verdict.rows for verdict in seen)
            several = f"{len(seen):,} sequences, " if len(seen) > 1 else ""
            model = f"top-{first.topk} of {self.num_experts} experts in {first.layers} layers"
            yield f"{several}{tokens:,} tokens, {rows:,} with a route; {model}"
            if len(seen) == 1 and first.facts:
                yield ", ".join(first.facts)
            yield ""
            even = f"even: {1 / experts:.2%}"
            most = f"of {math.log2(experts):.2f}"
            used = f"Experts used\nof {experts}"
            entropy = f"Entropy, bits\n{most}"
            cells = "{layer}|{rows:,}|{used:,}|{busiest_share:.2%} (expert {busiest})|{entropy:.2f}"
            rows_of_table = [cells.format(**layer).split("|") for layer in self.layers]
            yield Table(("Layer", "Rows", used, f"Busiest\n{even}", entropy), rows_of_table, range(1, 5))
            yield ""
        for words in self.unchecked:
            yield f"not checked: {words}"
        count = len(self.verdicts)
        bad = self.bad
        if self.good:
            all_of_them = f" ({count:,} sequences)" if count > 1 else ""
            limited = ", as far as it could be checked" if self.unchecked else ""
            yield f"ok{all_of_them}{limited}"
        elif count == 1:
            yield f"refused: {bad[0].problem}"
        else:
            yield f"refused: {len(bad):,} of {count:,} sequences"
            yield from (f"- {verdict.name}: {verdict.problem}" for verdict in bad[:_REFUSED])
            if len(bad) > _REFUSED:
                yield f"- and {len(bad) - _REFUSED:,} more: --json has them all"
