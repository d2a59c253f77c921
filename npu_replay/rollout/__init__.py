"""Reads and checks what comes from a rollout engine, whichever it is."""
