"""Record, replay or observe the routers of a model, in blocks."""
