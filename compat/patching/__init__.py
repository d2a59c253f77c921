"""How somebody else's module is changed: when it is imported, reported, and undone."""
