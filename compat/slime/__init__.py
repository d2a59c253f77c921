"""slime and its kin (vime, earlier miles): their routing replay without their patch of Megatron."""
