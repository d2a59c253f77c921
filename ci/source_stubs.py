"""Does a source hold what a stub says? Both are parsed, neither is imported.

A stub is a piece of Python that shows what is leaned on, and only that:

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

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def differences(stub: str, source: str) -> list[str]:
    """What the stub says and the source doesn't hold, a line each: «CompletionOutput has no field text»."""
    try:
        module = ast.parse(source)
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
