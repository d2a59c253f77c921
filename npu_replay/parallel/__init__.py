"""Maps routes to the tokens, layers and ranks of parallel training."""
