"""Where entries live: tiers behind one manager, each within a byte budget."""

from kvmosaic.store.base import CorruptEntryError, EntryInfo, Fetched, LookupResult, MissReason, Tier
from kvmosaic.store.index import ChunkHashIndex
from kvmosaic.store.manager import ChunkStorageManager
from kvmosaic.store.open import open_store
from kvmosaic.store.tiers.disk import DiskTier
from kvmosaic.store.tiers.host import HostTier

__all__ = [
    "ChunkHashIndex",
    "ChunkStorageManager",
    "CorruptEntryError",
    "DiskTier",
    "EntryInfo",
    "Fetched",
    "HostTier",
    "LookupResult",
    "MissReason",
    "Tier",
    "open_store",
]
