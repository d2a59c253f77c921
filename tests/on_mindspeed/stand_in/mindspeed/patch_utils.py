"""MindSpeed's table of patches."""

from ascend_contract import patching

from mindspeed.branch import BRANCH


class Patch(patching.Patch):
    restores_methods = BRANCH.restores_methods


class MindSpeedPatchesManager(patching.PatchesManager):
    kind = Patch
