"""Metrics of the chunk cache in vLLM: collected by workers and scheduler, shown by Prometheus and the log.

vLLM carries the numbers itself: each step it takes every worker's and the scheduler's stats, aggregates them and
sends the plain ``data`` to the process that logs and serves ``/metrics``.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvmosaic.engines.vllm.telemetry.series import (
    COUNTS,
    LEVELS,
    PREFIX,
    STAGE_BUCKETS,
    STAGE_SECONDS,
    CountName,
    FailingStage,
    Labelled,
    LevelName,
    Stage,
)

logger = logging.getLogger(__name__)


@dataclass
class ChunkStats(KVConnectorStats):
    """Statistics of one worker, or of the scheduler side, since they were last taken.

    ``data`` is ``{"counts": {name: {label: int}}, "levels": {name: {label: {rank: float}}}, "seconds": {stage:
    [float]}}``. vLLM aggregates over ranks and over time with the same method: levels of different ranks are kept
    side by side and added up when they are shown, while a rank's newer level replaces its older one. Counts are
    simply added, so an event that happens on all ranks alike has to be counted by one of them. Not thread-safe.
    """

    data: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    """Rank whose levels these are, different for all workers of one engine."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything. Statistics that were taken before keep their data."""
        self.data = {"counts": {}, "levels": {}, "seconds": {}}

    def count(self, name: CountName, label: str, amount: int = 1) -> None:
        """Count an event that happened ``amount`` times."""
        labels = self.data["counts"].setdefault(name, {})
        key = _plain(label)
        labels[key] = labels.get(key, 0) + int(amount)

    @contextmanager
    def doing_without(self, what: str) -> Iterator[None]:
        """Log and count a failure of the code inside, in the scheduler's process, and continue: nothing else depends
        on it."""
        try:
            yield
        except Exception:
            logger.exception("%s failed; the engine continues without it", what)
            self.failed("schedule")

    def failed(self, stage: FailingStage) -> None:
        """Count a failure that does not stop the engine."""
        self.count("errors", stage)

    def count_alike(self, name: CountName, label: str, amount: int = 1) -> None:
        """Count an event that happened ``amount`` times on all ranks alike: only the first rank counts it."""
        if self.rank == 0:
            self.count(name, label, amount)

    def level(self, name: LevelName, label: str, value: float) -> None:
        """Set a level of this rank to ``value``."""
        ranks = self.data["levels"].setdefault(name, {}).setdefault(_plain(label), {})
        # A string, because not every serialiser lets numbers be keys.
        ranks[str(self.rank)] = float(value)

    def observe(self, stage: Stage, seconds: float) -> None:
        """Record how long a stage took once."""
        self.data["seconds"].setdefault(_plain(stage), []).append(float(seconds))

    def take(self) -> "ChunkStats | None":
        """Statistics since the last call, or ``None`` if there are none: the answer to ``get_kv_connector_stats``."""
        if self.is_empty():
            return None
        taken = ChunkStats(self.data, self.rank)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> "ChunkStats":
        """The sum of both; ``other`` is the newer one. Neither is changed, because several of vLLM's loggers in one
        process accumulate from the same ``data``."""
        total = ChunkStats(rank=self.rank)
        counts, levels, seconds = total.data["counts"], total.data["levels"], total.data["seconds"]
        for part in (self.data, other.data):
            for name, labels in part["counts"].items():
                sums = counts.setdefault(name, {})
                for label, amount in labels.items():
                    sums[label] = sums.get(label, 0) + amount
            for name, labels in part["levels"].items():
                for label, ranks in labels.items():
                    levels.setdefault(name, {}).setdefault(label, {}).update(ranks)
            for stage, values in part["seconds"].items():
                seconds.setdefault(stage, []).extend(values)
        return total

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's periodic log line; stages as their mean in milliseconds."""
        counts: dict[str, dict[str, int]] = self.data["counts"]
        return {
            "chunk_hits": sum(counts.get("chunk_hits", {}).values()),
            "chunk_misses": sum(counts.get("chunk_misses", {}).values()),
            "chunks_filled": sum(counts.get("chunks_filled", {}).values()),
            "reused_tokens": counts.get("tokens", {}).get("reused", 0),
            "fallbacks": sum(counts.get("fallbacks", {}).values()),
            **{
                f"mean_{stage}_ms": round(sum(values) / len(values) * 1e3, 3)
                for stage, values in self.data["seconds"].items()
            },
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ChunkPromMetrics(KVConnectorPromMetrics):
    """Our metrics in vLLM's Prometheus endpoint, or in Ray's through vLLM's wrappers."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        if issubclass(self._counter_cls, Counter):
            _unregister()
        self._counters = {name: self._register(self._counter_cls, name, spec) for name, spec in COUNTS.items()}
        self._gauges = {
            name: self._register(self._gauge_cls, name, spec, multiprocess_mode="mostrecent")
            for name, spec in LEVELS.items()
        }
        self._stages = self._register(self._histogram_cls, "stage_seconds", STAGE_SECONDS, buckets=STAGE_BUCKETS)
        # A step brings the levels only of ranks that had something to report.
        self._levels: dict[tuple[int, str, str], dict[str, float]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's statistics: the ``data`` of a :class:`ChunkStats`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            for label, amount in transfer_stats_data["counts"].get(name, {}).items():
                counter.labels(*engine, *([label] if COUNTS[name].label else [])).inc(amount)
        for level, gauge in self._gauges.items():
            for label, ranks in transfer_stats_data["levels"].get(level, {}).items():
                known = self._levels.setdefault((engine_idx, level, label), {})
                known.update(ranks)
                gauge.labels(*engine, label).set(sum(known.values()))
        for stage, seconds in transfer_stats_data["seconds"].items():
            histogram = self._stages.labels(*engine, stage)
            for value in seconds:
                histogram.observe(value)

    def _register(self, kind: type[Any], name: str, spec: Labelled, **options: Any) -> Any:
        own = [spec.label] if spec.label else []
        metric = kind(
            name=PREFIX + name, documentation=spec.documentation, labelnames=[*self._labelnames, *own], **options
        )
        for engine in self.per_engine_labelvalues.values():
            for value in [[known] for known in spec.values] if own else [[]]:
                metric.labels(*engine, *value)
        return metric


def _plain(label: str) -> str:
    """The text of a string enum's member, which would otherwise be shown under its Python name."""
    return str.__str__(label)


def _unregister() -> None:
    """Unregister our metrics, so that a second engine in this process can register them. vLLM does so only for its
    own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
