"""MegatronAdaptor's table of patches."""

from ascend_contract.patching import Patch
from ascend_contract.patching import PatchesManager as Manager


class PatchesManager(Manager): ...


__all__ = ["Patch", "PatchesManager"]
