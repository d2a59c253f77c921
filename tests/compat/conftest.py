"""What tests of several files here stand on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npu_replay.compat import probe


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the only place where a product can be found."""
    stdlib = [
        entry
        for entry in sys.path
        if entry.endswith((".zip", "lib-dynload")) or Path(entry, "ast.py").is_file()
    ]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *stdlib])
    names = {module.partition(".")[0] for module, _ in probe._KNOWN.values()}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path
