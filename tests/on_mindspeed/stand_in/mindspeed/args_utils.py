"""Where arguments come from: megatron.training's, once they are set, else sys.argv, unknown flags and all."""

from __future__ import annotations

import argparse
from typing import Any

from mindspeed.branch import BRANCH
from mindspeed.features_manager import MindSpeedFeaturesManager

_MINDSPEED_ARGS: argparse.Namespace | None = None


def parser_unknown_args(args: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """Make attributes of unknown flags: `--a-b 1` is a_b = "1", and `-q` is the name ""."""
    taken: list[tuple[str, list[str]]] = []
    for word in unknown:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            taken.append((flag, [value] if equals else []))
        elif taken:
            taken[-1][1].append(word)
    for flag, values in taken:
        name = flag[2:].replace("-", "_")
        args[name] = True if not values else values[0] if len(values) == 1 else values
    return args


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """MindSpeed's own arguments; parsed once."""
    global _MINDSPEED_ARGS
    if _MINDSPEED_ARGS is not None and not get_defaults:
        return _MINDSPEED_ARGS
    parser = argparse.ArgumentParser(description="MindSpeed Arguments", allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    known, unknown = parser.parse_known_args([] if get_defaults else None)
    args = argparse.Namespace(**parser_unknown_args(vars(known), unknown))
    if not get_defaults:
        _MINDSPEED_ARGS = args
    return args


def get_full_args() -> Any:
    """megatron.training's arguments if they are set, else MindSpeed's own."""
    try:
        from megatron.training.global_vars import get_args

        return get_args() or get_mindspeed_args()
    except ImportError:
        return get_mindspeed_args()
    except AssertionError as error:
        if "args is not initialized." not in str(error):
            raise
        return get_mindspeed_args()


if BRANCH.over_megatron_adaptor:
    from megatron_adaptor.utils import args_utils

    get_full_args = args_utils.get_full_args
    get_mindspeed_args = args_utils.get_mindspeed_args
