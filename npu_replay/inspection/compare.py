"""Compare the routes in two files, or in two folders of samples, for npu-replay compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.routes.checks import Array
from npu_replay.routes.mismatch import difference
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RouteStore
from npu_replay.tables import Part, Table

_COUNTS = ("token_layers", "differing", "experts", "differing_experts")
"""Names what is counted in each layer.

These are tokens with a route on both sides, those of them whose sets of experts differ, the experts that A
named in the former, and those of them that B didn't name.
"""


@dataclass
class Comparison:
    """Holds all findings, summed over the samples.

    Attributes:
        alone_in_a, alone_in_b: samples of a folder that have no partner in the other.
        rows: of all samples compared, with and without a route.
        tokens: rows with a route on both sides; the fields below count only these.
        layers: by decoder layer, the `_COUNTS`, int64 [4].
        unsure: samples without a fingerprint on a side, which may be of different sequences.
    """

    a: str
    b: str
    folders: bool
    samples: int = 0
    alone_in_a: int = 0
    alone_in_b: int = 0
    rows: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    layers: dict[int, Array] = field(default_factory=dict)
    unsure: int = 0

    def add(self, where: str, a: RoutedExperts, b: RoutedExperts) -> None:
        """Count the two routings of one sequence; raise InvalidRoutes if they can't be compared."""
        InvalidRoutes.unless(
            a.layers == b.layers,
            "these routings are of other layers",
            expected=f"layers {[*a.layers]}",
            got=f"layers {[*b.layers]}",
            cause="routes of two models, or of one pipeline stage against all of them",
            where=where,
        )
        unsure = a.fingerprint is None or b.fingerprint is None
        InvalidRoutes.unless(
            unsure or a.fingerprint == b.fingerprint,
            "these routings are of other sequences",
            expected=f"fingerprint {a.fingerprint or 0:016x}",
            got=f"{b.fingerprint or 0:016x}",
            cause="another sample, one that was sampled anew, or text that was tokenised again",
            where=where,
        )
        self.samples += 1
        self.unsure += unsure
        self.rows += len(a)
        # In a folder, one sample without common routes must not stop the comparison of the others.
        if self.folders and len(a) == len(b) and not (a.recorded & b.recorded).any():
            return
        try:
            _, tokens, differ = difference(a, b)
        except InvalidRoutes as error:
            raise error.at(where) from error
        self.tokens += tokens
        self.differing_tokens += int(differ.any(dim=1).sum())
        for column, layer in enumerate(a.layers):
            rows = differ[:, column].nonzero()[:, 0]
            ours = a.ids[rows, column]
            theirs = b.ids[rows, column]
            # Slot by slot, to save memory: count ids that are not in the same row of `theirs`.
            others = sum(int((slot[:, None] != theirs).all(dim=1).sum()) for slot in ours.unbind(dim=1))
            counts = np.array([tokens, len(rows), tokens * a.topk, others], np.int64)
            self.layers[layer] = self.layers.get(layer, 0) + counts

    def to_json(self) -> str:
        layers = [{"layer": layer} | _described(self.layers[layer]) for layer in sorted(self.layers)]
        return json.dumps(vars(self) | self.whole | {"layers": layers}, indent=2)

    @property
    def whole(self) -> dict[str, Any]:
        return _described(np.sum([np.zeros(len(_COUNTS), np.int64), *self.layers.values()], axis=0))

    def parts(self) -> Iterator[Part]:
        yield f"A: {self.a}"
        yield f"B: {self.b}"
        if self.folders:
            alone = f"{self.alone_in_a:,} of A, {self.alone_in_b:,} of B"
            yield f"{self.samples:,} samples compared; without a partner: {alone}"
        yield f"{self.tokens:,} of {self.rows:,} tokens compared: those with a route on both sides"
        if self.unsure:
            of = f"{self.unsure:,} of {self.samples:,} samples have" if self.folders else "there is"
            yield f"not checked: that the tokens are the same, since {of} no fingerprint on one side or both"
        yield ""
        titles = ("Layer", "Tokens compared", "Tokens with\nother experts", "Experts that\nare others")
        whole = self.whole
        table = []
        lines = [(str(layer), _described(counts)) for layer, counts in sorted(self.layers.items())]
        for name, counts in [*lines, ("all", whole | {"token_layers": self.tokens})]:
            shares = f"{counts['token_share']:.2%}", f"{counts['expert_share']:.2%}"
            table.append((name, f"{counts['token_layers']:,}", *shares))
        yield Table(titles, table, numbers=range(1, 4))
        yield ""
        if whole["differing"]:
            anywhere = self.differing_tokens / self.tokens
            experts = f"{whole['expert_share']:.2%} of experts; {anywhere:.2%} of tokens differ in some layer"
            yield f"different: {whole['token_share']:.2%} of token-layers, {experts}"
        else:
            yield "the same: every token compared has the same experts in every layer"


def _described(counts: Array) -> dict[str, Any]:
    token_layers, differing, experts, differing_experts = counts.tolist()
    return dict(zip(_COUNTS, counts.tolist(), strict=True)) | {
        "token_share": differing / max(1, token_layers),
        "expert_share": differing_experts / max(1, experts),
    }


def compare_paths(a: Path, b: Path) -> Comparison:
    """Compare two files that RoutedExperts.save wrote, or the samples of two folders of a RouteStore.

    Raises:
        ReplayError: a path of another kind, or routes of other layers, experts or sequences.
    """
    comparison = Comparison(a=str(a), b=str(b), folders=a.is_dir())
    if comparison.folders:
        pairs = _in_folders(RouteStore(a), RouteStore(b), comparison)
    else:
        pairs = iter([(f"{a} and {b}", RoutedExperts.load(a), RoutedExperts.load(b))])
    for pair in pairs:
        comparison.add(*pair)
    InvalidRoutes.unless(
        comparison.tokens > 0,
        "no token has a route on both sides",
        where=f"{a} and {b}",
        expected="a sample with rows recorded in both",
        got=f"{comparison.samples:,} samples, {comparison.rows:,} rows",
        cause="a run whose routes were lost: npu-replay inspect says what is in each",
    )
    return comparison


def _in_folders(
    a: RouteStore, b: RouteStore, comparison: Comparison
) -> Iterator[tuple[str, RoutedExperts, RoutedExperts]]:
    """Yield the samples of both, one at a time: a folder may be larger than the memory.

    Partners have the same key, else the same fingerprint in the indexes, which are not verified yet.
    """
    partners = {key: key for key in a if key in b}
    left: dict[object, list[str]] = {}
    for key in b:
        if key not in partners:
            left.setdefault(b.described(key)[1]["fingerprint"], []).append(key)
    for key in a:
        mark = a.described(key)[1]["fingerprint"]
        if key not in partners and mark is not None and left.get(mark):
            partners[key] = left[mark].pop(0)
    comparison.alone_in_a = len(a) - len(partners)
    comparison.alone_in_b = len(b) - len(partners)
    where = f"{a.folder} and {b.folder}"
    ReplayError.unless(
        bool(partners),
        "no sample of one folder is in the other",
        expected="the same keys, or the same fingerprints",
        got=f"{len(a):,} and {len(b):,} samples with nothing in common",
        cause="two runs over other prompts, or answers that were sampled anew",
        where=where,
    )
    for ours, theirs in partners.items():
        key = ours if ours == theirs else f"{ours} and {theirs}"
        yield f"{where}, {key}", a[ours], b[theirs]
