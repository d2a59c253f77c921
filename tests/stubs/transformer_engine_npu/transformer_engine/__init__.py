"""A stand-in for TransformerEngineNPU, which needs an NPU and is in no package index.

It has what routing replay can notice of it: RMSNorm, the router's fused functions and the checkpoint. They
are written in our own words, from what its README and the heads of its files say, and from how Megatron-core
calls them. The other names are those that Megatron-core 0.17 and 0.18 ask for when they are imported; a
module of that kind can't be built. Numbers stay in the precision they have: there is no FP8 on a CPU.

The tests don't have this package on their path. A test that wants it starts a process with the folder
`transformer_engine_npu` on the path, which also says that the distribution is 2.13.0.
"""

__version__ = "2.13.0"

from . import common as common
from . import pytorch as pytorch
