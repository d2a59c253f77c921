"""What takes the place of Megatron's and torch's functions."""
