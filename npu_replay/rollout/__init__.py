"""What comes in from a rollout engine, whichever it is."""
