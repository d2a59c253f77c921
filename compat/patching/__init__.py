"""Changes other products' modules: when they are imported, reported and reversible."""
