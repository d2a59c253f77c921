"""The arguments of MegatronAdaptor, which newer MindSpeed hands on as its own."""

from __future__ import annotations

import argparse

_ARGUMENTS = argparse.Namespace(use_flash_attn=False)


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    return argparse.Namespace(use_flash_attn=False) if get_defaults else _ARGUMENTS


def get_full_args() -> argparse.Namespace:
    """Return megatron.training's arguments where they are set; here there are none but these."""
    return _ARGUMENTS
