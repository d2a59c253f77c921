"""What is patched, and the manager that does it."""
