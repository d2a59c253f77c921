"""Imports verl's router replay with every warning an error of its kind, and prints nothing."""

import warnings

import npu_replay

npu_replay.compat.cpu.lend().__enter__()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import verl.utils.megatron.router_replay_patch
    import verl.utils.megatron.router_replay_utils

found = [str(one.message) for one in said if "not support router replay" in str(one.message)]
assert not found, found
assert not [one for one in warnings.filters if one[1] and "router replay" in one[1].pattern]
