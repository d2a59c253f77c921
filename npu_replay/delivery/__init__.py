"""Each id once: routes are put where a sample ends, and fetched by ranks; batches carry references."""

from npu_replay.delivery.fetching import fetch
from npu_replay.delivery.references import Reference

__all__ = ["Reference", "fetch"]
