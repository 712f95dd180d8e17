"""The numbers of the server's page, from the metrics in the API server's process."""

from collections import Counter
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.vllm.compat.api_server import ServedEngine, metric_samples
from kvmosaic.engines.vllm.telemetry.series import COUNTS, LEVELS, PREFIX

_COUNTS = {f"{PREFIX}{name}_total": (name, spec.label) for name, spec in COUNTS.items()}
_LEVELS = {f"{PREFIX}{name}": (name.removeprefix("tier_"), spec.label) for name, spec in LEVELS.items()}


def server_statistics(config: ChunkCacheConfig, engine: ServedEngine) -> dict[str, Any]:
    """Counters and levels, added up over the engines of this server. Takes milliseconds, so call it from a thread."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTS}
    tiers: dict[str, Counter[str]] = {}
    tokens = Counter[str]()
    has_statistics = False
    for sample, labels, value in metric_samples():
        if sample in _COUNTS:
            has_statistics = True
            name, label = _COUNTS[sample]
            counts[name][labels.get(label, "")] += int(value)
        elif sample in _LEVELS:
            what, label = _LEVELS[sample]
            tiers.setdefault(labels[label], Counter())[what] += int(value)
        elif sample == "vllm:prompt_tokens_total":
            tokens["prompt"] += int(value)
        elif sample == "vllm:prompt_tokens_by_source_total" and labels.get("source") == "local_cache_hit":
            tokens["prefix"] += int(value)
    for tier, budget in (("host", config.host_memory), ("disk", config.disk_budget)):
        if tier in tiers:
            tiers[tier]["budget"] = budget * engine.num_workers
    return {
        "model": str(engine.model_config.served_model_name or engine.model_config.model),
        "counts": counts,
        "tiers": tiers,
        "prompt_tokens": tokens["prompt"],
        "prefix_tokens": tokens["prefix"],
        "has_statistics": has_statistics,
    }
