"""The arguments of the process."""
