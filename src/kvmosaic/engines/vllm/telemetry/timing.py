"""Durations of the stages of a load, measured without waiting for the GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvmosaic.core.accelerator import accelerator_of
from kvmosaic.engines.vllm.telemetry.cost import LinearCost
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.series import Stage


class Running:
    """A stage that is being timed."""

    end: torch.cuda.Event | None = None
    """Event that ends the stage, if its last work is not on the engine's stream."""
    has_failed: bool = False
    """Whether its duration says nothing about the next one."""


class StageTimer:
    """Records durations of stages in statistics: by the clock on a CPU, by events on an accelerator, which are read
    once they have passed."""

    def __init__(self, stats: ChunkStats, device: torch.device) -> None:
        self._stats = stats
        self._accelerator = accelerator_of(device)
        self._pending: list[tuple[Stage, int, torch.cuda.Event, torch.cuda.Event]] = []
        self.costs: dict[Stage, LinearCost] = {}
        """Costs of the stages that were given a number of tokens."""
        self._has_news = False

    @contextmanager
    def stage(self, name: Stage, tokens: int = 0) -> Iterator[Running]:
        """Time the code inside, which processes ``tokens`` tokens."""
        running = Running()
        if self._accelerator is None:
            begin = time.perf_counter()
            yield running
            self._observe(name, 0 if running.has_failed else tokens, time.perf_counter() - begin)
            return
        start, end = (self._accelerator.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield running
        end.record()
        self._pending.append((name, 0 if running.has_failed else tokens, start, running.end or end))

    def take_news(self) -> bool:
        """Whether anything was added to ``costs`` since the last call."""
        news, self._has_news = self._has_news, False
        return news

    def collect(self) -> None:
        """Record the stages that have ended by now."""
        while self._pending and self._pending[0][3].query():
            name, tokens, start, end = self._pending.pop(0)
            self._observe(name, tokens, start.elapsed_time(end) / 1e3)

    def _observe(self, name: Stage, tokens: int, seconds: float) -> None:
        self._stats.observe(name, seconds)
        if tokens:
            self.costs.setdefault(name, LinearCost()).observe(tokens, seconds)
            self._has_news = True
