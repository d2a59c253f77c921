"""Where arguments come from."""

from ascend_contract.features import Arguments

from mindspeed.branch import BRANCH
from mindspeed.features_manager import MindSpeedFeaturesManager

if BRANCH.over_megatron_adaptor:
    from megatron_adaptor.utils.args_utils import ARGUMENTS
else:
    ARGUMENTS = Arguments(MindSpeedFeaturesManager)

get_full_args = ARGUMENTS.get_full_args
get_mindspeed_args = ARGUMENTS.get_mindspeed_args
