"""The tiers of an engine, for the line that it logs when it starts."""

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.store import ChunkStorageManager


def tiers_in_words(config: ChunkCacheConfig, store: ChunkStorageManager, device_bytes: int) -> str:
    """Each tier that is in use, and its size."""
    budgets = {"device": device_bytes, "host": config.host_memory, "disk": config.disk_budget}
    held = store.held()  # a disk that cannot be used has no tier
    tiers = [f"{name} {size / 2**30:.1f} GiB" for name, size in budgets.items() if name in held]
    if config.remote:
        tiers.append(f"remote {config.remote}{' head by head' if config.per_head_storage else ''}")
    return ", ".join(tiers)
