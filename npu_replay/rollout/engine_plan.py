"""Reads the plan of an engine's start, and checks it against the engine's tables."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from npu_replay.errors import ReplayError
from npu_replay.rollout.release_rules import Clash, EnginePlan, Fault, release, tells_release

_log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["flag", "count", "number", "text", "keys"]
"""What an argument that is written as text means: True or False, an int, a float, itself, or JSON."""
_WORDS = dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True)
_WORDS |= dict.fromkeys(("false", "f", "no", "n", "off", "0"), False)
"""What pydantic reads as a flag, which vLLM's configs are made of."""


@dataclass(frozen=True)
class EngineArguments:
    """Holds the arguments to start an engine with.

    Attributes:
        arguments: by the name of the Python argument (`enable_return_routed_experts`): the planned ones, and
            those that the capture needs.
        environment: variables that the engine's processes also need.
        negates: whether its server knows `--no-...`; if not, an argument that is False is left out.
    """

    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    negates: bool = True

    def command_line(self) -> list[str]:
        """Return the arguments as options of the engine's server; those that are None are left out.

        >>> from npu_replay.rollout.engine_plan import EngineArguments
        >>> EngineArguments({"tp_size": 8, "async_scheduling": False}).command_line()
        ['--tp-size', '8', '--no-async-scheduling']

        Raises:
            TypeError: an argument can't be written as text, such as an object of the engine's own.
        """
        words: list[str] = []
        for name, value in self.arguments.items():
            dashed = name.replace("_", "-")
            if value is None or (value is False and not self.negates):
                continue
            if isinstance(value, bool):
                words.append(f"--{dashed}" if value else f"--no-{dashed}")
            elif not isinstance(value, (list, tuple)):
                words += [f"--{dashed}", _text(value)]
            elif value:
                words += [f"--{dashed}", *map(_text, value)]
        return words


def _text(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return str(value)
    return json.dumps(dict(value) if isinstance(value, Mapping) else value)


def refusal(product: str, version: str, device: str, faults: Iterable[Fault]) -> ReplayError | None:
    """Return why a release gives no routes, whatever it is started with; None if it gives them."""
    never = next((fault for fault in faults if fault.always and fault.holds(version, device)), None)
    if never is None:
        return None
    return ReplayError(
        f"{product} {version} {never.always}",
        where="rollout",
        expected=never.instead,
        got=version,
        cause=never.cause,
    )


def clash(
    product: str,
    version: str,
    device: str,
    plan: EnginePlan,
    table: Iterable[Clash],
    keys: Mapping[str, str] | None = None,
) -> ReplayError | None:
    """Return why a release gives no routes with this plan, by the first row that holds, or None.

    `keys` has the names of the arguments in a framework's config, for the message.
    """
    called = keys or {}
    for row in table:
        if not row.holds(version, device) or not row.when(plan, row.arguments):
            continue
        planned = [name for name in row.arguments if plan.get(name) is not None]
        names = ", ".join(called.get(name, name) for name in planned)
        problem = row.problem.format_map(plan) or f"gives no routes, or wrong ones, with this {names}"
        values = ", ".join(f"{called.get(name, name)}={plan[name]!r}" for name in planned)
        release_name = f"{product} {version}"
        return ReplayError(
            f"{release_name} {problem}",
            where="rollout",
            expected=row.instead if row.problem else f"{names}: {row.instead}",
            got=row.got or values,
            cause=row.why,
        )
    return None


def sure(table: Iterable[Clash], version: str) -> list[Clash]:
    """Return the rows of a table that certainly hold for this release; for an unknown one, those of all."""
    has_release = tells_release(version)
    return [row for row in table if has_release or not (row.since or row.until)]


def refuse(problem: ReplayError | None) -> None:
    """Raise the error, if there is one."""
    if problem is not None:
        raise problem


def refuse_untold(product: str, version: Any, parameter: str, example: str, numbers: int = 2) -> None:
    """Refuse a version that names no release: no table could be applied to it."""
    ReplayError.unless(
        tells_release(version, numbers),
        "this version doesn't tell its release",
        where=f"rollout, {product}",
        expected=f'the release that it is nearest to: pass {parameter}="{example}", say',
        got=repr(version),
        cause="a nightly build, or one from a clone without tags",
    )


@functools.cache  # warns once per process and release
def warn_of_later(product: str, version: str, newest: str) -> None:
    """Warn of a release later than the newest whose source was read: a misspelt one, or one to come."""
    if tells_release(version) and release(version) > release(newest):
        _log.warning(
            "[npu_replay] no %s %s is known, the newest is %s: the arguments are those of %s, and whether it "
            "gives routes with them isn't known. Look at its first answers with `npu-replay inspect`",
            *(product, version, newest, newest),
        )


def read_plan(
    planned: Mapping[str, Any], kinds: Mapping[str, Kind], short: Mapping[str, str]
) -> dict[str, Any]:
    """Return the planned arguments, which have to be under their Python names, with their values read.

    `short` maps other names on the command line to the Python names, for the message of an error.
    """
    for written in planned:
        name = _python_name(written, short)
        name = f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name or "enable_eplb, say"
        if written != name:
            raise unreadable(written, f"its Python name: {name}", repr(written))
    return {name: _read(name, value, kinds) for name, value in planned.items()}


def as_a_config_has_it(
    written: str, value: Any, kinds: Mapping[str, Kind], short: Mapping[str, str]
) -> tuple[str, Any]:
    """Return the Python name and the value of an argument that a framework's config writes as an option.

    >>> from npu_replay.rollout.engine_plan import as_a_config_has_it
    >>> as_a_config_has_it("no-async-scheduling", True, {}, {})
    ('async_scheduling', False)
    """
    name = _python_name(written, short)
    value = _read(name, value, kinds)
    return (name.removeprefix("no_"), not value) if name.startswith("no_") else (name, value)


def _python_name(written: str, short: Mapping[str, str]) -> str:
    """Return the Python name of an argument that is written as on a command line, or with one of its keys."""
    name = written.lstrip("-_").replace("-", "_").partition(".")[0]
    return short.get(name, name)


def _read(name: str, value: Any, kinds: Mapping[str, Kind]) -> Any:
    """Return what a value means that may be text; what can't be read is left to the engine to refuse."""
    kind = kinds.get(name, "flag" if name.startswith(("no_", "enable_", "disable_")) else "text")
    if kind == "flag":
        return _WORDS.get(str(value).lower(), value)
    if isinstance(value, str) and kind == "keys":
        mapping = _of_json(value)
        return value if mapping is None else mapping
    if isinstance(value, str) and kind in ("count", "number"):
        with suppress(ValueError):
            read = float(value)
            if kind == "number":
                return read
            if read.is_integer():
                return int(read)
    return value


def unreadable(name: str, expected: str, got: str) -> ReplayError:
    return ReplayError(
        f"the argument {name} can't be read, so it can't be checked",
        where="rollout",
        expected=expected,
        got=got,
    )


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an argument of several keys as a mapping: given as one, as JSON, or as an object."""
    if isinstance(value, str):  # as a shell script or a YAML file has it
        return _of_json(value) or {}
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): item for key, item in value.items()}
    return getattr(value, "__dict__", {})


def _of_json(text: str) -> Mapping[str, Any] | None:
    """Return the mapping that a text is in JSON; None if it is no mapping."""
    with suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, Mapping):
            return as_mapping(value)
    return None


def number(value: Any) -> int:
    """Return a number that may be text; 0 for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def several(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
    return any(number(plan.get(name)) > 1 for name in arguments)


def on(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
    return any(bool(plan.get(name)) for name in arguments)


def off(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
    return any(plan.get(name) is False for name in arguments)


def says(*words: str) -> Callable[[EnginePlan, tuple[str, ...]], bool]:
    """Make a rule that holds if one of the arguments is one of these words."""

    def one_of_them(plan: EnginePlan, arguments: tuple[str, ...]) -> bool:
        return any(str(plan.get(name)).lower().replace("-", "_") in words for name in arguments)

    return one_of_them
