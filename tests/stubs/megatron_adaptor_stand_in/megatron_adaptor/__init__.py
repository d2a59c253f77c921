"""A stand-in for MegatronAdaptor: the few of its manners that routing replay can notice, in our own words.

It lies in a folder of its own, which a test puts on the path of the process that asks for it. The source of
MegatronAdaptor can't be fetched: what is here follows the code of the projects that build on it (MindSpeed,
ROLL, vime, AReaL) and a copy of its patch manager in Megatron-LM-FL. Nothing of it routes.

Importing it patches torch, imports Megatron and patches that, once.
"""

from __future__ import annotations

from megatron_adaptor.features_manager.features_manager import FeaturesManager
from megatron_adaptor.utils.args_utils import ARGUMENTS

ARGUMENTS.repatch(FeaturesManager, {})
