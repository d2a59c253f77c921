"""The blocks: what hangs on a model while it records or replays."""
