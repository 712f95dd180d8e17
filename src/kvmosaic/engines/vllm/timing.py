"""How long the stages of a load take, without waiting for the GPU to know."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvmosaic.engines.vllm.metrics import ChunkStats, Stage


class StageTimer:
    """Observes stages into statistics: by the clock on a CPU, by events on a GPU, read once they have passed."""

    def __init__(self, stats: ChunkStats, device: torch.device) -> None:
        self._stats = stats
        self._on_gpu = device.type == "cuda"
        self._pending: list[tuple[Stage, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Time what happens inside."""
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._stats.observe(name, time.perf_counter() - begin)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._pending.append((name, start, end))

    def collect(self) -> None:
        """Observe the stages that are over by now."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.pop(0)
            self._stats.observe(name, start.elapsed_time(end) / 1e3)
