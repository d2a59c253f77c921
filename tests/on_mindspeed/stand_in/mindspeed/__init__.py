"""A stand-in for MindSpeed: the few of its manners that routing replay can notice, in our own words.

Nothing here needs an NPU: `tests/stubs` gives `torch_npu`, `ascend_contract` what MindSpeed has in common
with MegatronAdaptor, and `megatron/training` beside this package what Megatron-core's wheel leaves out.
"""

from .branch import BRANCH

if BRANCH.over_megatron_adaptor and __name__ == "mindspeed":  # tests read branch.py under another name
    import megatron_adaptor  # noqa: F401
