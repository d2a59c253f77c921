"""A stand-in for MindSpeed: the few of its manners that routing replay can notice, in our own words.

Each module stands for one of them and says which. `test_fidelity.py` asks stand-in and real MindSpeed the
same questions, so that what is said here can be believed. Nothing here needs an NPU; `tests/stubs` gives
`torch_npu`, and `megatron/training` beside this package what Megatron-core's wheel leaves out.
"""

from .branch import BRANCH

if BRANCH.over_megatron_adaptor and __name__ == "mindspeed":  # tests read branch.py under another name
    import megatron_adaptor  # noqa: F401
