"""ROLL in these tests: its source is on the path (ci/frameworks.sh roll FOLDER), and what it imports."""

import needed

NEEDED = ("roll.distributed", "ray", "tensordict", "accelerate", "transfer_queue", "opentelemetry.exporter")
CURE = "ROLL is in no registry: ci/frameworks.sh roll FOLDER"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, NEEDED, CURE, "roll")
