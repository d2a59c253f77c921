"""slime in these tests: its source is on the path (ci/frameworks.sh slime FOLDER), and a Megatron-core."""

import needed

CURE = "slime is in no registry: ci/frameworks.sh slime FOLDER MEGATRON"
HOOKS = needed.hooks(__file__, ["slime"], CURE, "slime", "megatron")
pytest_pycollect_makemodule, pytest_collection_modifyitems = HOOKS
