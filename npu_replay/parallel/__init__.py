"""Parallel training: which token, layer and rank."""
