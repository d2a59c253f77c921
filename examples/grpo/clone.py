"""Puts this clone's root on the path, here and in processes that are started: for `examples.qwen3_moe`."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])

if ROOT not in sys.path:
    sys.path.append(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ROOT)))
