"""Metrics of a rank's store: its events and its contents."""

from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.store import ChunkStorageManager


class StoreStats:
    """Counts a store's events since it was last asked, and the sizes of its tiers."""

    def __init__(self, store: ChunkStorageManager, stats: ChunkStats) -> None:
        self._store = store
        self._stats = stats
        self._counted = store.event_counts()

    def collect(self) -> None:
        """Add the store's metrics, if there is any news."""
        counts = self._store.event_counts()
        if self._stats.is_empty() and counts == self._counted:
            return
        for event in ("evictions", "write_errors", "dropped_writes"):
            self._stats.count(event, "", counts[event] - self._counted[event])
        self._counted = counts
        for name, (entries, nbytes) in self._store.held().items():
            self._stats.level("tier_entries", name, entries)
            self._stats.level("tier_bytes", name, nbytes)
