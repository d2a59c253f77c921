"""What is measured or worked out from a clone, beside the package."""

SUBJECTS = (
    "router",
    "host",
    "checked",
    "recompute",
    "micro-batch",
    "other-top-k",
    "wrapper",
    "gather",
    "decode",
    "capture",
    "step",
    "open-and-close",
    "inputs",
    "overlap",
    "layout",
    "import",
)
"""What can be measured, in order, as --only has them."""
