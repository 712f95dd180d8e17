"""Builds the store a configuration asks for."""

import logging
from contextlib import suppress

import torch

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import KVFormat
from kvmosaic.core.heads import HeadShare
from kvmosaic.store.base import Tier, TierDownError
from kvmosaic.store.manager import ChunkStorageManager
from kvmosaic.store.seal import EntryCheck, Seal
from kvmosaic.store.tiers.device import DeviceTier
from kvmosaic.store.tiers.disk import DiskTier
from kvmosaic.store.tiers.guarded import GuardedTier
from kvmosaic.store.tiers.host import HostTier
from kvmosaic.store.tiers.remote import open_remote_tier

logger = logging.getLogger(__name__)


def open_store(
    config: ChunkCacheConfig,
    device_pool: torch.Tensor | None = None,
    share: HeadShare | None = None,
    kv_format: KVFormat | None = None,
) -> ChunkStorageManager:
    """A store with these tiers, from fast to slow: device, if a pool is given; host; disk, if ``disk_path`` is set
    and usable; remote, if ``remote`` is set, reachable now or later. ``share`` is the part of a model's KV that this
    process holds. ``kv_format`` is its format; entries of other formats are never returned. The store key, if there
    is one, comes from the environment."""
    check = EntryCheck(Seal.from_environment(), kv_format)
    tiers: list[Tier] = [HostTier(config.host_memory)]
    if device_pool is not None:
        tiers.insert(0, DeviceTier(device_pool))
    if config.disk_path is not None:
        try:
            tenant = None if config.tenant_quota is None else config.tenant
            place = DiskTier(config.disk_path.expanduser(), config.disk_budget, tenant, check, counts_reads=True)
            disk = GuardedTier(place, f"the disk tier in {config.disk_path}")
            with suppress(TierDownError):  # the disk hangs, and may come back
                disk.prepare()
            tiers.append(disk)
        except OSError as error:
            logger.warning(
                "no disk tier: cannot use disk_path=%s (%s); entries are kept in memory only; set disk_path to a "
                "directory that can be created and read",
                config.disk_path,
                error,
            )
    if config.remote is not None:
        own = share if config.per_head_storage else None
        tiers.append(open_remote_tier(config.remote, config.remote_deadline_ms / 1000, own, check))
    return ChunkStorageManager(tiers, kv_format)
