"""What is measured or worked out from a clone, beside the package."""
