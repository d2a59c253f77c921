"""npu-replay compare: how far the routes in two files, or in two folders of samples, are apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

import torch

from npu_replay.errors import InvalidRoutes, ReplayError, RouteFileError
from npu_replay.routes.mismatch import check_comparable, differing_token_layers
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RouteStore
from npu_replay.tables import Part, Table


@dataclass(frozen=True)
class Counts:
    """What was compared in one layer, or in all together.

    Attributes:
        token_layers: tokens with a route on both sides, once for each layer.
        differing: those of them whose sets of experts differ.
        experts: the experts that A named in them.
        differing_experts: those of them that B didn't name.

    >>> (Counts(10, 1, 40, 2) + Counts(10, 0, 40, 0)).token_share
    0.05
    """

    token_layers: int = 0
    differing: int = 0
    experts: int = 0
    differing_experts: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def token_share(self) -> float:
        return self.differing / max(1, self.token_layers)

    @property
    def expert_share(self) -> float:
        return self.differing_experts / max(1, self.experts)

    def described(self) -> dict[str, int | float]:
        return asdict(self) | {"token_share": self.token_share, "expert_share": self.expert_share}


@dataclass
class Comparison:
    """All that was found, added up over the samples.

    Attributes:
        a, b: the paths.
        folders: are they folders?
        samples: how many were compared.
        alone_in_a, alone_in_b: samples of a folder that have no partner in the other.
        rows: of all samples compared, with and without a route.
        tokens: the rows with a route on both sides; what follows is about these.
        without_route_in_a, without_route_in_b: rows.
        differing_tokens: tokens with a difference in some layer.
        layers: by decoder layer.
        unsure: samples without a fingerprint on a side, so nobody can tell whether they are one sequence.
    """

    a: str
    b: str
    folders: bool
    samples: int = 0
    alone_in_a: int = 0
    alone_in_b: int = 0
    rows: int = 0
    tokens: int = 0
    without_route_in_a: int = 0
    without_route_in_b: int = 0
    differing_tokens: int = 0
    layers: dict[int, Counts] = field(default_factory=dict)
    unsure: int = 0

    @property
    def whole(self) -> Counts:
        """All layers together."""
        return sum(self.layers.values(), Counts())

    def add(self, where: str, a: RoutedExperts, b: RoutedExperts) -> None:
        """Count the two routings of one sequence in.

        Raises:
            InvalidRoutes: they can't be compared; says where.
        """
        # One sample of many whose routes were lost is no reason to say nothing of the others.
        lost = self.folders and len(a) == len(b) and not (a.recorded & b.recorded).any()
        try:
            _check_alike(a, b)
            tokens = 0 if lost else check_comparable(a, b)[1]
        except InvalidRoutes as error:
            raise error.at(where) from error
        self.samples += 1
        self.unsure += a.fingerprint is None or b.fingerprint is None
        self.rows += len(a)
        self.without_route_in_a += int((~a.recorded).sum())
        self.without_route_in_b += int((~b.recorded).sum())
        if lost:
            return
        differ = differing_token_layers(a, b)
        self.tokens += tokens
        self.differing_tokens += int(differ.any(dim=1).sum())
        for column, layer in enumerate(a.layers):
            rows = differ[:, column].nonzero()[:, 0]
            others = _only_in_first(a.ids[rows, column], b.ids[rows, column])
            counts = Counts(tokens, len(rows), tokens * a.topk, others)
            self.layers[layer] = self.layers.get(layer, Counts()) + counts

    def to_json(self) -> str:
        """All of it, for programs. Shares are of one."""
        layers = [{"layer": layer} | counts.described() for layer, counts in sorted(self.layers.items())]
        return json.dumps(asdict(self) | self.whole.described() | {"layers": layers}, indent=2)


def compare_paths(a: Path, b: Path) -> Comparison:
    """Compare two files that RoutedExperts.save wrote, or the samples of two folders of a RouteStore.

    Raises:
        ReplayError: a path that is neither, a file and a folder, or routes that can't be compared: other
            layers, another number of experts, another sequence, nothing in common.
    """
    for path in (a, b):
        if not path.is_dir() and not path.is_file():
            words = "this is no plain file" if path.exists() else "there is no such file or folder"
            raise RouteFileError(words, where=str(path))
    if a.is_dir() != b.is_dir():
        folder, file = (a, b) if a.is_dir() else (b, a)
        raise ReplayError(
            "a folder and a file can't be compared",
            expected="two files of RoutedExperts.save, or two folders of a RouteStore",
            got=f"the folder {folder} and the file {file}",
            cause="one shard of a RouteStore in the place of its folder",
        )
    found = Comparison(a=str(a), b=str(b), folders=a.is_dir())
    pairs = _in_folders(RouteStore(a), RouteStore(b), found) if found.folders else _of_files(a, b)
    for pair in pairs:
        found.add(*pair)
    if not found.tokens:
        raise InvalidRoutes(
            "no token has a route on both sides",
            where=f"{a} and {b}",
            expected="a sample with rows recorded in both",
            got=f"{found.samples:,} samples, {found.rows:,} rows",
            cause="a run whose routes were lost: npu-replay inspect says what is in each",
        )
    return found


def _of_files(a: Path, b: Path) -> Iterator[tuple[str, RoutedExperts, RoutedExperts]]:
    yield f"{a} and {b}", RoutedExperts.load(a), RoutedExperts.load(b)


def _in_folders(
    a: RouteStore, b: RouteStore, found: Comparison
) -> Iterator[tuple[str, RoutedExperts, RoutedExperts]]:
    """The samples of both, one at a time: a folder may be larger than the memory."""
    partners = _partners(a, b)
    found.alone_in_a, found.alone_in_b = len(a) - len(partners), len(b) - len(partners)
    if not partners:
        raise ReplayError(
            "no sample of one folder is in the other",
            where=f"{a.folder} and {b.folder}",
            expected="the same keys, or the same fingerprints",
            got=f"{len(a):,} and {len(b):,} samples with nothing in common",
            cause="two runs over other prompts, or answers that were sampled anew",
        )
    for ours, theirs in partners.items():
        key = ours if ours == theirs else f"{ours} and {theirs}"
        yield f"{a.folder} and {b.folder}, {key}", a[ours], b[theirs]


def _partners(a: RouteStore, b: RouteStore) -> dict[str, str]:
    """The key in `b` of each key in `a` that has a partner: the same, else one of the same tokens, by the
    fingerprints in their indexes, which nobody has checked yet."""
    partners = {key: key for key in a if key in b}
    left: dict[object, list[str]] = {}
    for key in b:
        if key not in partners:
            left.setdefault(b.described(key)[1]["fingerprint"], []).append(key)
    for key in a:
        mark = a.described(key)[1]["fingerprint"]
        if key not in partners and mark is not None and left.get(mark):
            partners[key] = left[mark].pop(0)
    return partners


def _check_alike(a: RoutedExperts, b: RoutedExperts) -> None:
    """Refuse what `check_comparable` allows: it takes the layers that both have, and any two sequences."""
    if a.layers != b.layers:
        raise InvalidRoutes(
            "these routings are of other layers",
            expected=f"layers {_spans(a.layers)}",
            got=f"layers {_spans(b.layers)}",
            cause="routes of two models, or of one pipeline stage against all of them",
        )
    if a.fingerprint != b.fingerprint and a.fingerprint is not None and b.fingerprint is not None:
        raise InvalidRoutes(
            "these routings are of other sequences",
            expected=f"fingerprint {a.fingerprint:016x}",
            got=f"{b.fingerprint:016x}",
            cause="another sample, one that was sampled anew, or text that was tokenised again",
        )


def _spans(layers: tuple[int, ...]) -> str:
    """«0, 3 to 26»: where a layer is missing shows, however many there are."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    spans = zip(starts, ends, strict=True)
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


def _only_in_first(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many ids of [rows, topk] the same row of `theirs` hasn't got, slot by slot to save memory."""
    return sum(int((slot[:, None] != theirs).all(dim=1).sum()) for slot in ours.unbind(dim=1))


def parts(found: Comparison) -> Iterator[Part]:
    """What was compared and what couldn't be, each layer, and the verdict: lines and a table."""
    yield [("A: ", "bold"), found.a]
    yield [("B: ", "bold"), found.b]
    if found.folders:
        yield (
            f"{found.samples:,} samples compared; without a partner: "
            f"{found.alone_in_a:,} of A, {found.alone_in_b:,} of B"
        )
    yield (
        f"{found.tokens:,} of {found.rows:,} tokens compared; rows without a route: "
        f"{found.without_route_in_a:,} in A, {found.without_route_in_b:,} in B"
    )
    if found.unsure:
        of = f"{found.unsure:,} of {found.samples:,} samples have" if found.folders else "there is"
        yield f"not checked: that the tokens are the same, since {of} no fingerprint on one side or both"
    yield ""
    yield _table(found)
    yield ""
    whole = found.whole
    if whole.differing:
        shares = f"{percent(whole.token_share)} of token-layers, {percent(whole.expert_share)} of experts"
        anywhere = percent(found.differing_tokens / found.tokens)
        yield f"different: {shares}; {anywhere} of tokens differ in some layer", "bold yellow"
    else:
        yield "the same: every token compared has the same experts in every layer", "bold green"


def _table(found: Comparison) -> Table:
    titles = ("Layer", "Tokens compared", "Tokens with\nother experts", "Experts that\nare others")
    lines = [(str(layer), one.token_layers, one, "") for layer, one in sorted(found.layers.items())]
    rows = [
        [(cell, style) for cell in (name, f"{tokens:,}", percent(one.token_share), percent(one.expert_share))]
        for name, tokens, one, style in [*lines, ("all", found.tokens, found.whole, "bold")]
    ]
    return Table(titles, rows, numbers=range(1, 4))


def percent(share: float) -> str:
    """Never 0.00% where something differs, never 100.00% where something doesn't.

    >>> percent(1e-9), percent(0.034), percent(1 - 1e-9)
    ('< 0.01%', '3.40%', '> 99.99%')
    """
    if 0 < share < 0.0001:
        return "< 0.01%"
    return "> 99.99%" if 0.9999 < share < 1 else f"{share:.2%}"
