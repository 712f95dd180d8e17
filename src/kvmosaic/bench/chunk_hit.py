"""Time to get one chunk's KV by computing it, from host memory, or from disk."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvmosaic.core.errors import PromptError
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.hf.request_kv import RequestKV

PLACE = 777
"""Position of the chunk in the request. It was computed at another one, so every source pays for the remap."""


def run(model: str, tokens: int = 512, repeats: int = 7, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Median milliseconds until the chunk's KV is in a request's cache, by source."""
    chunk = torch.randint(1000, 10000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    result: dict[str, Any] = {"model": model, "tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        progress("loading the model")
        loaded = LLM(model).model
        settings: dict[str, Any] = {"enable_chunk_cache": True, "disk_path": Path(folder), "remote": None}
        # The disk tier alone: without host memory nothing is promoted, so every lookup reads the file.
        with LLM(loaded, **settings, host_memory=0) as from_disk, LLM(loaded, **settings) as from_host:
            if from_host.max_positions is not None and PLACE + tokens > from_host.max_positions:
                raise PromptError(f"--tokens {tokens}: the model has {from_host.max_positions} positions, use fewer")
            progress("computing")
            result["compute_ms"] = _median(lambda: _obtain(from_host, chunk, expect=None), repeats, from_host)
            from_host.chunk_cache.store.flush()
            progress("host")
            result["host_ms"] = _median(lambda: _obtain(from_host, chunk, expect="host"), repeats)
            progress("disk")
            result["disk_ms"] = _median(lambda: _obtain(from_disk, chunk, expect="disk"), repeats)
            [found] = from_host.chunk_cache.find_or_fill([chunk], from_host.chunk_cache.sink, PLACE + tokens)
            result["entry_mb"] = found.entry.nbytes / 2**20
    result["host_speedup"] = result["compute_ms"] / result["host_ms"]
    result["disk_speedup"] = result["compute_ms"] / result["disk_ms"]
    return result


def _obtain(llm: LLM, chunk: list[int], expect: str | None) -> float:
    """Milliseconds from asking for the chunk to having it in place."""
    engine, length = llm.engine, PLACE + len(chunk)
    with engine.session():
        kv = RequestKV(engine.format, length, llm.model.device)
        start = time.perf_counter()
        [found] = llm.chunk_cache.find_or_fill([chunk], llm.chunk_cache.sink, length)
        assert found.tier == expect, f"expected the chunk from {expect}, it came from {found.tier} ({found.reason})"
        engine.remap(found.entry, kv, PLACE, length)
        return (time.perf_counter() - start) * 1e3


def _median(action: Callable[[], float], repeats: int, clear_before: LLM | None = None) -> float:
    times = []
    for _ in range(repeats):
        if clear_before is not None:
            clear_before.chunk_cache.clear()
        times.append(action())
    return statistics.median(times)
