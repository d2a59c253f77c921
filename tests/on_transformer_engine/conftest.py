"""TransformerEngineNPU in these tests: the stand-in under tests/stubs on the path, or the real one.

`.ci/run` runs them on the releases of Megatron-core that go with it. No other test has it on the path, since
Megatron-core decides by its presence what it imports.
"""

import needed

NEEDED = ("transformer_engine", "megatron.core")
CURE = "Put tests/stubs/transformer_engine_npu and Megatron-core 0.17 or newer on PYTHONPATH"
pytest_pycollect_makemodule, pytest_collection_modifyitems = needed.hooks(__file__, NEEDED, CURE, "megatron")
