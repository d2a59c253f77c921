"""MindSpeed takes get_args from here as well."""

from megatron.training.global_vars import get_args

__all__ = ["get_args"]
