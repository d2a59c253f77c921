"""Gives slime, vime and earlier miles routing replay without their patch of Megatron."""
