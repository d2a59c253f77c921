"""What the frameworks share."""

from . import recipe as recipe
