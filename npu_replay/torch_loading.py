"""Import torch without a device backend that fails to load.

`import torch` imports device packages (torch_npu) at its end, and fails if one of them fails, for want of
CANN, for example. Importing this module first keeps torch, without that device. With NPU_REPLAY_DISABLE=on
nothing is done, and torch fails as it does by itself.
"""

from __future__ import annotations

import logging
import os
import sys

from npu_replay import environment

logger = logging.getLogger(__name__)

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _load() -> None:
    if environment.disabled() or "torch" in sys.modules or os.environ.get(_SWITCH, "1") != "1":
        return
    os.environ[_SWITCH] = "0"
    try:
        import torch
    finally:
        del os.environ[_SWITCH]  # the variable was unset or 1, which mean the same
    load = getattr(torch, "_import_device_backends", lambda: None)
    try:
        load()
    except RuntimeError as error:
        logger.warning(
            "[npu_replay] torch goes on without a device backend that fails to load: %s. npu-replay doctor "
            "says what to do. Where npu_replay isn't imported first `import torch` fails, unless %s=0",
            error.__cause__ or error,
            _SWITCH,
        )


_load()
