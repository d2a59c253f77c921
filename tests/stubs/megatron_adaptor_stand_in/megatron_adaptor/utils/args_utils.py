"""Where arguments come from. MindSpeed from 1881e01a on hands these functions on as its own."""

from ascend_contract.features import Arguments

from megatron_adaptor.features_manager.features_manager import FeaturesManager

ARGUMENTS = Arguments(FeaturesManager)
get_full_args = ARGUMENTS.get_full_args
get_mindspeed_args = ARGUMENTS.get_mindspeed_args
