"""Does a released product still have what npu_replay leans on? Its source is parsed, not imported.

    python ci/contracts.py                      # the releases that CI checks
    python ci/contracts.py vllm==0.34.0         # a new release is held to what the newest had to keep
    python ci/contracts.py vllm-ascend==0.23.0 --source FOLDER    # a branch's source, held to that release's
    python ci/contracts.py --all                # every release that pip finds, from the first that is known
    python ci/contracts.py --all megatron-core  # ... of one product

What is leaned on stands in ci/contracts.toml. A contract that is broken is a line that says where: something
is gone, or there before its time. Then a decoder may read wrongly, or a shim find nothing to change: look at
that release before you replay what it sends. At run time shims look for names and signatures themselves.
What lies under .work is read there, all else by pip (ci/releases.py).

The code of a contract is a stub, a piece of Python that shows what is leaned on, and only that:

    @dataclass                                   # a decorator of a class
    class CompletionOutput(BaseModel):           # a class, with this base
        token_ids: ...                           # a field, of any type
        routed_experts: np.ndarray | None = None # of this type, with this default
    def numpy2base64(array):                     # a function that can be called with this
        np.save(..., allow_pickle=False)         # and holds these, in this order
    from vllm.utils import numpy2base64          # a name that is imported from there

`...` stands for any expression, and as a call's last argument for any further arguments. `**_` in a signature
allows it further arguments that have to be given; those with a default it may always have.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib
from packaging.version import Version

if TYPE_CHECKING:
    from releases import Index

HERE = Path(__file__).resolve().parent
FETCHED = HERE.parent / ".work"
FOLDERS = {"megatron-core": "megatron"}
"""Under FETCHED, where it isn't the product's name."""
KEPT, NOT_YET, BROKEN = "yes", "–", "BROKEN"


class Release:
    """The files of one release, by their path from the package's root, such as «vllm/outputs.py».

    Args:
        root: a folder, or a wheel, of which only the files that are asked for are fetched.
    """

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """A file's text; None where there is no such file."""
        file = self._root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def paths(self) -> list[str]:
        """All files."""
        return list(_files(self._root, ""))


def _files(folder: Path | zipfile.Path, path: str) -> Iterator[str]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{path}{one.name}/")
        else:
            yield path + one.name


@dataclass(frozen=True)
class Clause:
    """What one file of the releases from `since` on, and before `until`, has to hold."""

    contract: str
    file: str
    code: str
    since: Version
    until: Version | None = None
    elsewhere: bool = False
    """Other releases may hold it too."""

    def covers(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def range(self) -> str:
        return f"from {self.since} on" if self.until is None else f"from {self.since} to before {self.until}"

    def broken(self, release: Release) -> list[str]:
        """One line for each thing that isn't there."""
        source = release.read(self.file)
        if source is None:
            return [f"no such file{_moved(self.file, release)}"]
        return differences(self.code, source)


@dataclass(frozen=True)
class Product:
    """A product's contracts."""

    package: str
    says: Mapping[str, str]
    """What each contract is about, by its name."""
    clauses: Sequence[Clause]
    first: Version
    """The first release that `--all` looks at."""
    ci: Sequence[Version]
    """Those that CI looks at."""
    candidates: bool = True
    """Whether `--all` looks at release candidates and nightly builds too."""

    def looks_at(self, version: Version) -> bool:
        """Is this a release for `--all`?"""
        return version >= self.first and (self.candidates or not version.is_prerelease)

    def check(self, version: Version, release: Release) -> tuple[dict[str, str], list[str]]:
        """What came of each contract, and a line for each break."""
        outcome, lines = {}, []
        for contract in self.says:
            broken = list(self._broken(contract, version, release))
            covered = any(clause.covers(version) for clause in self.clauses if clause.contract == contract)
            outcome[contract] = BROKEN if broken else KEPT if covered else NOT_YET
            lines += [f"{self.package} {version}: {line}" for line in broken]
        return outcome, lines

    def _broken(self, contract: str, version: Version, release: Release) -> Iterator[str]:
        clauses = [clause for clause in self.clauses if clause.contract == contract]
        covering = [clause for clause in clauses if clause.covers(version)]
        for clause in covering:
            yield from (f"{clause.file}: {line}" for line in clause.broken(release))
        for clause in clauses:
            # What is there before its time changes what a payload means just as well.
            if clause not in covering and not clause.elsewhere and not clause.broken(release):
                yield f"{clause.file}: holds «{contract}» as releases {clause.range()} do, and shouldn't"


def products(text: str) -> dict[str, Product]:
    """What a contracts.toml says."""
    found = {}
    for package, table in tomllib.loads(text).items():
        clauses = [
            Clause(
                contract,
                clause["file"],
                clause["code"],
                Version(clause["since"]),
                Version(clause["until"]) if "until" in clause else None,
                clause.get("elsewhere", False),
            )
            for contract, part in table["contract"].items()
            for clause in part["clause"]
        ]
        says = {contract: part["says"] for contract, part in table["contract"].items()}
        found[package] = Product(
            package,
            says,
            clauses,
            Version(table["first"]),
            [Version(one) for one in table["ci"]],
            table.get("candidates", True),
        )
    return found


def _moved(file: str, release: Release) -> str:
    """Where a file that isn't there may have gone: to the only other one of its name."""
    paths = release.paths()
    for ending in ("/".join(file.split("/")[-2:]), file.split("/")[-1]):
        found = [path for path in paths if path == ending or path.endswith("/" + ending)]
        if len(found) == 1:
            return f"; moved to {found[0]}?"
    return ""


def _asked(
    names: Sequence[str], everything: bool, known: Mapping[str, Product], index: Index
) -> Iterator[tuple[Product, Version]]:
    for name in names or known:
        package, _, version = name.partition("==")
        if package not in known:
            raise SystemExit(f"{name}: give PACKAGE or PACKAGE==VERSION, of {', '.join(known)}")
        product = known[package]
        if version:
            chosen = [Version(version)]
        elif everything:
            chosen = [one for one in index.versions(package) if product.looks_at(one)]
        else:
            chosen = list(product.ci)
        yield from ((product, one) for one in chosen)


# What a source holds of a stub. Both are parsed, neither is imported.

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


parsed = functools.lru_cache(64)(ast.parse)
"""The files of a release are asked by many clauses, and some have thousands of lines."""


def differences(stub: str, source: str) -> list[str]:
    """What the stub says and the source doesn't hold, a line each: «CompletionOutput has no field text»."""
    try:
        module = parsed(source)
    except SyntaxError as error:
        return [f"Python {sys.version_info.major}.{sys.version_info.minor} can't parse it: {error.msg}"]
    return list(_missing(ast.parse(stub).body, module.body, module, ""))


def _missing(
    wanted: Sequence[ast.stmt], body: Sequence[ast.stmt], module: ast.Module, owner: str
) -> Iterator[str]:
    for statement in wanted:
        if isinstance(statement, ast.ClassDef):
            yield from _class(statement, body, module, owner)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _function(statement, body, owner)
        elif isinstance(statement, ast.AnnAssign):
            yield from _field(statement, body, owner)
        elif isinstance(statement, ast.ImportFrom):
            yield from _import(statement, module)
        elif not _is_ellipsis(statement):
            yield from _held([statement], body, owner or "the module")


def _class(wanted: ast.ClassDef, body: Sequence[ast.stmt], module: ast.Module, owner: str) -> Iterator[str]:
    name = _within(owner, wanted.name)
    found = _definition(wanted.name, (ast.ClassDef,), body)
    if not isinstance(found, ast.ClassDef):
        yield f"no class {name}"
        return
    decorators = {ast.unparse(decorator) for decorator in found.decorator_list}
    for decorator in map(ast.unparse, wanted.decorator_list):
        if decorator not in decorators:
            yield f"{name} is no @{decorator}"
    bases = {ast.unparse(base) for base in found.bases}
    for base in map(ast.unparse, wanted.bases):
        if base not in bases:
            yield f"{name} is no {base}"
    yield from _missing(wanted.body, list(_with_bases(found, module)), module, name)


def _function(
    wanted: ast.FunctionDef | ast.AsyncFunctionDef, body: Sequence[ast.stmt], owner: str
) -> Iterator[str]:
    name = _within(owner, wanted.name)
    found = _definition(wanted.name, (ast.FunctionDef, ast.AsyncFunctionDef), body)
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield f"{owner} has no method {wanted.name}" if owner else f"no function {name}"
        return
    yield from _signature(wanted.args, found.args, name)
    yield from _held([s for s in wanted.body if not _is_ellipsis(s)], found.body, name)


def _signature(wanted: ast.arguments, found: ast.arguments, name: str) -> Iterator[str]:
    wanted_defaults, found_defaults = _defaults(wanted), _defaults(found)
    for argument, default in wanted_defaults.items():
        if argument not in found_defaults:
            yield f"{name} has no argument {argument}"
        elif default is not None and not _same(default, found_defaults[argument]):
            got = _text(found_defaults[argument])
            yield f"{name} has {argument} {got} by default, not {_text(default)}"
    if wanted.kwarg is None:
        for argument, default in found_defaults.items():
            if default is None and argument not in wanted_defaults:
                yield f"{name} wants an argument {argument}"
    positional = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    order = [argument.arg for argument in wanted.args if argument.arg in positional]
    if order != [argument for argument in positional if argument in order]:
        yield f"{name} has its arguments in another order: {', '.join(positional)}"


def _field(wanted: ast.AnnAssign, body: Sequence[ast.stmt], owner: str) -> Iterator[str]:
    name = ast.unparse(wanted.target)
    found = _assignment(name, body)
    where = _within(owner, name)
    if found is None:
        yield f"{owner} has no field {name}" if owner else f"no name {name}"
        return
    annotation = found.annotation if isinstance(found, ast.AnnAssign) else None
    if not _same(wanted.annotation, annotation):
        yield f"{where} is of type {_text(annotation)}, not {_text(wanted.annotation)}"
    if wanted.value is not None and not _same(wanted.value, found.value):
        yield f"{where} is {_text(found.value)} by default, not {_text(wanted.value)}"


def _import(wanted: ast.ImportFrom, module: ast.Module) -> Iterator[str]:
    found = {
        alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module, node.level) == (wanted.module, wanted.level)
        for alias in node.names
    }
    for alias in wanted.names:
        if alias.name not in found:
            yield f"it doesn't import {alias.name} from {wanted.module}"


def _held(wanted: Iterable[ast.stmt], body: Sequence[ast.stmt], where: str) -> Iterator[str]:
    """Each of `wanted`, after the one before it."""
    nodes = [node for statement in body for node in ast.walk(statement) if hasattr(node, "lineno")]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]
    place, before = 0, ""
    for statement in wanted:
        pattern = statement.value if isinstance(statement, ast.Expr) else statement
        matches = [i for i, node in enumerate(nodes) if _same(pattern, node)]
        following = [i for i in matches if i >= place]
        if not matches:
            yield f"{where} has no `{ast.unparse(statement)}`"
        elif not following:
            yield f"{where} has `{ast.unparse(statement)}` before `{before}`, not after it"
        else:
            place, before = following[0] + 1, ast.unparse(statement)


def _definition(name: str, kinds: tuple[type, ...], body: Sequence[ast.stmt]) -> Definition | None:
    # The last one counts: what comes before it are overloads.
    found = [node for node in _flat(body) if isinstance(node, kinds) and node.name == name]
    return found[-1] if found else None


def _assignment(name: str, body: Sequence[ast.stmt]) -> ast.AnnAssign | ast.Assign | None:
    """Where a field is declared, or where a method sets it on `self`."""
    for node in _flat(body):
        if _assigns(node, name):
            return node
    for method in _flat(body):
        if isinstance(method, ast.FunctionDef):
            for node in ast.walk(method):
                if _assigns(node, f"self.{name}"):
                    return node
    return None


def _assigns(node: ast.AST, name: str) -> bool:
    targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(ast.unparse(target) == name for target in targets)


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, with those inside an `if` or a `try`."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _with_bases(found: ast.ClassDef, module: ast.Module) -> Iterator[ast.stmt]:
    """A class's own statements, then those of its bases in the same file that it doesn't override."""
    yield from found.body
    own = {node.name for node in _flat(found.body) if isinstance(node, Definition)}
    for base in map(ast.unparse, found.bases):
        parent = _definition(base, (ast.ClassDef,), module.body)
        if isinstance(parent, ast.ClassDef) and parent is not found:
            inherited = _with_bases(parent, module)
            yield from (one for one in inherited if not isinstance(one, Definition) or one.name not in own)


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    positional = [*arguments.posonlyargs, *arguments.args]
    values = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    named = zip((*positional, *arguments.kwonlyargs), (*values, *arguments.kw_defaults), strict=True)
    return {argument.arg: default for argument, default in named}


def _same(pattern: object, found: object) -> bool:
    """Whether two pieces of syntax are equal, where `...` in the pattern is equal to any expression."""
    if _is_wildcard(pattern):
        return True
    if isinstance(pattern, ast.Call) and pattern.args and _is_wildcard(pattern.args[-1]):
        return isinstance(found, ast.Call) and _same(pattern.func, found.func) and _calls_with(pattern, found)
    if isinstance(pattern, list):
        return isinstance(found, list) and len(pattern) == len(found) and all(map(_same, pattern, found))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(found) and all(
            _same(value, getattr(found, name, None))
            for name, value in ast.iter_fields(pattern)
            if name not in ("ctx", "kind", "type_comment")
        )
    return pattern == found


def _calls_with(pattern: ast.Call, found: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in found.keywords}
    first = pattern.args[:-1]
    return (
        len(found.args) >= len(first)
        and all(map(_same, first, found.args))
        and all(word.arg in given and _same(word.value, given[word.arg]) for word in pattern.keywords)
    )


def _is_wildcard(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_ellipsis(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _is_wildcard(statement.value)


def _within(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _text(node: ast.expr | None) -> str:
    return "nothing" if node is None else f"`{ast.unparse(node)}`"


# The command


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a contract is broken."""
    # Not above: it imports pip, after which no setuptools can be imported, and the tests import this module.
    from releases import Index

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="*", help="such as vllm==0.34.0, or vllm; none: all that CI checks")
    parser.add_argument("--all", action="store_true", help="every release that pip finds")
    parser.add_argument("--source", type=Path, help="its source lies there: a clone, or what was unpacked")
    options = parser.parse_args(arguments)
    if options.source and not (len(options.release) == 1 and "==" in options.release[0]):
        parser.error("--source is held to the contracts of one release: PACKAGE==VERSION")
    known = products((HERE / "contracts.toml").read_text(encoding="utf-8"))
    wrong = 0
    with Index() as index:
        for product, version in _asked(options.release, options.all, known, index):
            here = FETCHED / FOLDERS.get(product.package, product.package) / str(version)
            source = options.source or (here if here.is_dir() else None)
            there = contextlib.nullcontext(source) if source else index.open(product.package, version)
            with there as root:
                outcome, lines = product.check(version, Release(root))
            wrong += len(lines)
            kept = sum(one == KEPT for one in outcome.values())
            absent = sum(one == NOT_YET for one in outcome.values())
            print(f"{product.package} {version}: {kept} kept, {absent} absent as expected", flush=True)
            for line in lines:
                print(line, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LookupError as error:
        sys.exit(f"ci/contracts.py: {error}")
