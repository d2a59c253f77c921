"""Blocks that record, replay or observe the routers of a model."""
