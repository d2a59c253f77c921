"""verl's trainer with a live vLLM, in the environment that ci/live.sh makes."""

import needed

NEEDED = ("vllm", "ray", "mbridge", "transfer_queue", "verl.trainer")
CURE = "Run ci/live.sh: it has all of them"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, NEEDED, CURE)
