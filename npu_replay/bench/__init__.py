"""`npu-replay bench`: what it costs."""

SUBJECTS = (
    "router",
    "other-top-k",
    "gather",
    "decode",
    "capture",
    "step",
    "inputs",
    "overlap",
    "layout",
    "import",
)
"""What can be measured, in order, as --only has them."""
