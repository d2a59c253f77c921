"""Does a released product still have what npu_replay leans on? Its source is parsed, not imported.

    python ci/contracts.py                      # the releases that CI checks
    python ci/contracts.py vllm==0.34.0         # a new release is held to what the newest had to keep
    python ci/contracts.py --all                # every release that pip finds, from the first that is known
    python ci/contracts.py --all megatron-core  # ... of one product

What is leaned on stands in ci/contracts.toml. A contract that is broken is a line that says where: something
is gone, or there before its time. Then a decoder may read wrongly, or a shim find nothing to change: look at
that release before you replay what it sends. At run time shims look for names and signatures themselves.
What lies under .work is read there (a branch's source may lie in .work/vllm-ascend/0.23.0, too), all else by
pip (ci/releases.py).

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
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib
from packaging.version import Version

HERE = Path(__file__).resolve().parent
FETCHED = HERE.parent / ".work"
FOLDERS = {"megatron-core": "megatron"}
"""Under FETCHED, where it isn't the product's name."""
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

Read = Callable[[str], "str | None"]
"""The text of a release's file, such as «vllm/outputs.py»; None where there is no such file."""


@dataclass(frozen=True)
class Clause:
    """What one file of the releases from `since` on, and before `until`, has to hold.

    Attributes:
        elsewhere: other releases may hold it too.
    """

    file: str
    code: str
    since: Version
    until: Version | None = None
    elsewhere: bool = False

    def covers(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def broken(self, read: Read) -> list[str]:
        """One line for each thing that isn't there."""
        source = read(self.file)
        return ["no such file"] if source is None else differences(self.code, source)


@dataclass(frozen=True)
class Product:
    """A product's contracts, by name, and which of its releases are looked at.

    Attributes:
        ci: without arguments.
        first: with `--all` the first one.
        candidates: whether `--all` looks at release candidates and nightly builds too.
    """

    package: str
    contracts: Mapping[str, Sequence[Clause]]
    first: Version
    ci: Sequence[Version]
    candidates: bool = True

    def looks_at(self, version: Version) -> bool:
        """Is this a release for `--all`?"""
        return version >= self.first and (self.candidates or not version.is_prerelease)

    def check(self, version: Version, read: Read) -> dict[str, list[str] | None]:
        """Return a line for each break, by contract; None for one that such a release has not."""
        found: dict[str, list[str] | None] = {}
        for name, clauses in self.contracts.items():
            lines = []
            for clause in clauses:
                if clause.covers(version):
                    lines += [f"{clause.file}: {line}" for line in clause.broken(read)]
                # What is there before its time changes what a payload means just as well.
                elif not clause.elsewhere and not clause.broken(read):
                    until = "on" if clause.until is None else f"to before {clause.until}"
                    held = f"as releases from {clause.since} {until} do"
                    lines.append(f"{clause.file}: holds «{name}» {held}, and shouldn't")
            covered = any(clause.covers(version) for clause in clauses)
            told = [f"{self.package} {version}: {line}" for line in lines]
            found[name] = told if told or covered else None
        return found


def products(text: str) -> dict[str, Product]:
    """What a contracts.toml says."""
    found = {}
    for package, table in tomllib.loads(text).items():
        contracts = {
            name: [
                Clause(
                    clause["file"],
                    clause["code"],
                    Version(clause["since"]),
                    Version(clause["until"]) if "until" in clause else None,
                    clause.get("elsewhere", False),
                )
                for clause in part["clause"]
            ]
            for name, part in table["contract"].items()
        }
        ci = [Version(one) for one in table["ci"]]
        candidates = table.get("candidates", True)
        found[package] = Product(package, contracts, Version(table["first"]), ci, candidates)
    return found


def read_in(root: Path) -> Read:
    """Read files of a folder."""

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def asked(
    names: Sequence[str],
    everything: bool,
    known: Mapping[str, Product],
    versions: Callable[[str], Sequence[Version]],
) -> Iterator[tuple[Product, Version]]:
    """Yield the releases that a command line means; `versions` are all of a package."""
    for name in names or known:
        package, _, version = name.partition("==")
        if package not in known:
            raise SystemExit(f"{name}: give PACKAGE or PACKAGE==VERSION, of {', '.join(known)}")
        product = known[package]
        if version:
            yield product, Version(version)
        elif everything:
            yield from ((product, one) for one in versions(package) if product.looks_at(one))
        else:
            yield from ((product, one) for one in product.ci)


# What a source holds of a stub. Both are parsed, neither is imported.

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
    inside = f"{owner}." if owner else ""
    for statement in wanted:
        if isinstance(statement, ast.ClassDef):
            yield from _class(statement, body, module, inside)
        elif isinstance(statement, FUNCTIONS):
            name = inside + statement.name
            function = _definition(statement.name, FUNCTIONS, body)
            if not isinstance(function, FUNCTIONS):
                yield f"{owner} has no method {statement.name}" if owner else f"no function {name}"
                continue
            yield from _signature(statement.args, function.args, name)
            yield from _held([one for one in statement.body if not _is_ellipsis(one)], function.body, name)
        elif isinstance(statement, ast.AnnAssign):
            yield from _field(statement, body, owner)
        elif isinstance(statement, ast.ImportFrom):
            place = statement.module, statement.level
            nodes = (node for node in ast.walk(module) if isinstance(node, ast.ImportFrom))
            imports = {one.name for node in nodes if (node.module, node.level) == place for one in node.names}
            for alias in statement.names:
                if alias.name not in imports:
                    yield f"it doesn't import {alias.name} from {statement.module}"
        elif not _is_ellipsis(statement):
            yield from _held([statement], body, owner or "the module")


def _class(wanted: ast.ClassDef, body: Sequence[ast.stmt], module: ast.Module, inside: str) -> Iterator[str]:
    name = inside + wanted.name
    found = _definition(wanted.name, (ast.ClassDef,), body)
    if not isinstance(found, ast.ClassDef):
        yield f"no class {name}"
        return
    for sign, those, there in (
        ("@", wanted.decorator_list, found.decorator_list),
        ("", wanted.bases, found.bases),
    ):
        lines = set(map(ast.unparse, there))
        yield from (f"{name} is no {sign}{line}" for line in map(ast.unparse, those) if line not in lines)
    # Its own statements, then those of its bases in the same file that it doesn't override.
    yield from _missing(wanted.body, list(_with_bases(found, module)), module, name)


def _signature(wanted: ast.arguments, found: ast.arguments, name: str) -> Iterator[str]:
    wanted_defaults = _defaults(wanted)
    found_defaults = _defaults(found)
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
    """A field is declared in the body, or a method sets it on `self`."""
    name = ast.unparse(wanted.target)
    statements = list(_flat(body))
    methods = (one for one in statements if isinstance(one, ast.FunctionDef))
    declared = ((name, node) for node in statements)
    on_self = ((f"self.{name}", node) for method in methods for node in ast.walk(method))
    for target, node in itertools.chain(declared, on_self):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if target in map(ast.unparse, targets):
                break
    else:
        yield f"{owner} has no field {name}" if owner else f"no name {name}"
        return
    where = f"{owner}.{name}" if owner else name
    annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
    if not _same(wanted.annotation, annotation):
        yield f"{where} is of type {_text(annotation)}, not {_text(wanted.annotation)}"
    if wanted.value is not None and not _same(wanted.value, node.value):
        yield f"{where} is {_text(node.value)} by default, not {_text(wanted.value)}"


def _held(wanted: Iterable[ast.stmt], body: Sequence[ast.stmt], where: str) -> Iterator[str]:
    """Each of `wanted`, after the one before it."""
    nodes = [node for statement in body for node in ast.walk(statement) if hasattr(node, "lineno")]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]
    place = 0
    before = ""
    for statement in wanted:
        pattern = statement.value if isinstance(statement, ast.Expr) else statement
        matches = [i for i, node in enumerate(nodes) if _same(pattern, node)]
        following = [i for i in matches if i >= place]
        if not matches:
            yield f"{where} has no `{ast.unparse(statement)}`"
        elif not following:
            yield f"{where} has `{ast.unparse(statement)}` before `{before}`, not after it"
        else:
            place = following[0] + 1
            before = ast.unparse(statement)


def _definition(name: str, kinds: tuple[type, ...], body: Sequence[ast.stmt]) -> ast.stmt | None:
    # The last one counts: what comes before it are overloads.
    found = [node for node in _flat(body) if isinstance(node, kinds) and node.name == name]
    return found[-1] if found else None


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
    yield from found.body
    own = {node.name for node in _flat(found.body) if isinstance(node, (ast.ClassDef, *FUNCTIONS))}
    for base in map(ast.unparse, found.bases):
        parent = _definition(base, (ast.ClassDef,), module.body)
        if isinstance(parent, ast.ClassDef) and parent is not found:
            inherited = _with_bases(parent, module)
            yield from (one for one in inherited if getattr(one, "name", None) not in own)


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
        if not isinstance(found, ast.Call) or not _same(pattern.func, found.func):
            return False
        given = {keyword.arg: keyword.value for keyword in found.keywords}
        first = pattern.args[:-1]
        return _same(first, found.args[: len(first)]) and all(
            word.arg in given and _same(word.value, given[word.arg]) for word in pattern.keywords
        )
    if isinstance(pattern, list):
        return isinstance(found, list) and len(pattern) == len(found) and all(map(_same, pattern, found))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(found) and all(
            _same(value, getattr(found, name, None))
            for name, value in ast.iter_fields(pattern)
            if name not in ("ctx", "kind", "type_comment")
        )
    return pattern == found


def _is_wildcard(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _is_ellipsis(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _is_wildcard(statement.value)


def _text(node: ast.expr | None) -> str:
    return "nothing" if node is None else f"`{ast.unparse(node)}`"


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a contract is broken."""
    # Not above: it imports pip, after which no setuptools can be imported, and the tests import this module.
    from releases import Index

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", nargs="*", help="such as vllm==0.34.0, or vllm; none: all that CI checks")
    parser.add_argument("--all", action="store_true", help="every release that pip finds")
    options = parser.parse_args(arguments)
    known = products((HERE / "contracts.toml").read_text(encoding="utf-8"))
    wrong = 0
    with Index() as index, tempfile.TemporaryDirectory() as scratch:
        for product, version in asked(options.release, options.all, known, index.versions):
            root = FETCHED / FOLDERS.get(product.package, product.package) / str(version)
            if not root.is_dir():
                root = Path(scratch) / product.package / str(version)
                index.unpack(product.package, version, root)
            found = product.check(version, read_in(root)).values()
            absent = sum(lines is None for lines in found)
            kept = sum(lines == [] for lines in found)
            print(f"{product.package} {version}: {kept} kept, {absent} absent as expected", flush=True)
            for line in itertools.chain.from_iterable(filter(None, found)):
                wrong += 1
                print(line, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LookupError as error:
        sys.exit(f"ci/contracts.py: {error}")
