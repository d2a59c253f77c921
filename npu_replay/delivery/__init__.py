"""Each id once: routes are put where a sample ends, and fetched by ranks; batches carry references."""

from npu_replay.delivery.carriers import Carrier, ProcessCarrier
from npu_replay.delivery.fetching import fetch, free
from npu_replay.delivery.folder import FolderCarrier
from npu_replay.delivery.references import Reference

__all__ = ["Carrier", "FolderCarrier", "ProcessCarrier", "Reference", "fetch", "free"]
