"""Where arguments come from: megatron.training's, once they are set, else sys.argv, unknown flags and all.

MindSpeed from 1881e01a on hands these functions on as its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_adaptor.features_manager.features_manager import FeaturesManager

_MINDSPEED_ARGS: argparse.Namespace | None = None
_FULL_ARGS: Any = None


def add_args(args: dict[str, Any], key: str | None, value: list[str] | None) -> None:
    """Make an attribute of an unknown flag: `--a-b 1` is a_b = "1", and `-q` is the name ""."""
    if key is not None:
        single = value[0] if value is not None and len(value) == 1 else value
        args[key[2:].replace("-", "_")] = True if value is None else single


def parser_unknown_args(args: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """Make attributes of all flags that no feature knows."""
    key: str | None = None
    value: list[str] | None = None
    for word in unknown:
        if word.startswith("-"):
            add_args(args, key, value)
            key, equals, rest = word.partition("=")
            value = [rest] if equals else None
        else:
            value = [*(value or []), word]
    add_args(args, key, value)
    return args


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """MegatronAdaptor's arguments, under the name that they had in MindSpeed; parsed once."""
    global _MINDSPEED_ARGS
    if _MINDSPEED_ARGS is not None and not get_defaults:
        return _MINDSPEED_ARGS
    parser = argparse.ArgumentParser(description="MindSpeed Arguments", allow_abbrev=False)
    FeaturesManager.register_features_args(parser)
    known, unknown = parser.parse_known_args([] if get_defaults else None)
    args = argparse.Namespace(**parser_unknown_args(vars(known), unknown))
    if not get_defaults:
        _MINDSPEED_ARGS = args
    return args


def set_full_args(args: Any) -> None:
    """Set what `get_full_args` returns from now on."""
    global _FULL_ARGS
    _FULL_ARGS = args


def get_full_args() -> Any:
    """megatron.training's arguments if they are set, else MegatronAdaptor's own."""
    if _FULL_ARGS is not None:
        return _FULL_ARGS
    try:
        from megatron.training.global_vars import get_args

        return get_args() or get_mindspeed_args()
    except ImportError:
        return get_mindspeed_args()
    except AssertionError as error:
        if "args is not initialized." not in str(error):
            raise
        return get_mindspeed_args()
