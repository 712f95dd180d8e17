"""The line that an engine logs when it starts: what is on, with which tiers."""

import logging
from typing import Any

import torch

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.paged.by_kernel import KernelBlocks
from kvmosaic.engines.vllm.support import images_problem
from kvmosaic.store import ChunkStorageManager

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


def say_what_is_on(
    vllm_config: Any,
    config: ChunkCacheConfig,
    store: ChunkStorageManager,
    device_pool: torch.Tensor | None,
    blocks: RequestBlocks,
) -> None:
    """Log for which model the cache is on, each tier that is in use and its size, how entries get into ``blocks``,
    and what is not reused."""
    model = vllm_config.model_config
    device_bytes = 0 if device_pool is None else device_pool.nbytes
    budgets = {"device": device_bytes, "host": config.host_memory, "disk": config.disk_budget}
    held = store.held()  # a disk that cannot be used has no tier
    tiers = [f"{name} {size / 2**30:.1f} GiB" for name, size in budgets.items() if name in held]
    if config.remote:
        tiers.append(f"remote {config.remote}{' head by head' if config.per_head_storage else ''}")
    writer = "kvmosaic's kernel" if isinstance(blocks, KernelBlocks) else "the backend's writer"
    choice = f"{config.policy} at {config.recompute_ratio:.0%}" if config.recompute_ratio else "nothing recomputed"
    logger.info(
        "chunk cache on for %s: %s; documents from %s; %s; chunks placed by %s",
        model.served_model_name,
        ", ".join(tiers),
        config.chunk_sources,
        choice,
        writer,
    )
    if config.prefix_blocks and not blocks.can_read:
        logger.warning("prefix_blocks: no prefix is stored, as this attention backend's cache cannot be read")
    problem = images_problem(vllm_config) if model.is_multimodal_model else None
    if problem is not None:
        logger.warning("%s", problem)
