"""Moves each id once: a sample's routes are stored where it ends, ranks fetch them by references."""

from npu_replay.delivery.references import Reference, fetch

__all__ = ["Reference", "fetch"]
