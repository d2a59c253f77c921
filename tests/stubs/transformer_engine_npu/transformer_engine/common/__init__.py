"""What the frameworks share."""

from . import recipe

__all__ = ["recipe"]
