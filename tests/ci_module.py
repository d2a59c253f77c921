"""The modules of ci/, which import their neighbours by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[1] / "ci"


def ci_module(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        return importlib.import_module(name)
