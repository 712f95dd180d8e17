"""Many new combinations of known documents, with little memory: does reuse stay as fast as it was?

Plain vLLM with its prefix cache and vLLM with the chunk cache answer the same queries, one at a time. The engines run
one after the other, each in a separate process.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import compare, tell
from kvmosaic.bench.steps import Steps, hit_share
from kvmosaic.bench.traffic import Corpus, assemble, new_combinations
from kvmosaic.core.errors import ConfigError

POOL_PROMPTS = 4
"""Number of prompts whose KV fits into vLLM's own cache."""
OUTPUTS = 4
"""Number of tokens per answer. Missing documents are filled in the steps after the first token."""


def run(
    model: Model,
    corpus: Corpus,
    queries: int,
    batch: int,
    device_share: float,
    host_share: float,
    ratio: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Mean time to the first token of both engines, by batches of ``batch`` queries, and the speed-up of reuse. The
    first batch has to fill the cache. ``device_share``, ``host_share``: sizes of the chunk cache on the device and in
    host memory, as shares of the corpus. Plain vLLM gets the device's share in addition to its own cache."""
    if queries < 2 * batch:
        raise ConfigError(f"{queries} queries in batches of {batch}: there have to be at least two batches")
    arguments = {
        "model": asdict(model),
        "corpus": asdict(corpus),
        "queries": queries // batch * batch,
        "batch": batch,
        "device_share": device_share,
        "host_share": host_share,
        "ratio": ratio,
    }
    measured = compare(__name__, arguments, progress)
    rows: list[dict[str, Any]] = []
    for number, (plain, reuse) in enumerate(
        zip(measured["plain"]["batches"], measured["reuse"]["batches"], strict=True), 1
    ):
        times = {"plain_ttft_ms": plain["ttft_ms"], "reuse_ttft_ms": reuse.pop("ttft_ms")}
        speedup = times["plain_ttft_ms"] / times["reuse_ttft_ms"]
        rows.append({"batch": number, "queries": batch, **times, "speedup": speedup, **reuse})
    return {
        "machine": measured["reuse"]["machine"],
        **arguments,
        "evictions": measured["reuse"]["evictions"],
        "last_over_second": rows[-1]["speedup"] / rows[1]["speedup"],
        "rows": rows,
    }


def measure(
    engine: str,
    model: dict[str, Any],
    corpus: dict[str, Any],
    queries: int,
    batch: int,
    device_share: float,
    host_share: float,
    ratio: float,
) -> dict[str, Any]:
    """Times of one engine, by batch."""
    import torch

    tell("starting vLLM")
    shape, documents = Model(**model), Corpus(**corpus)
    has_gpu = torch.cuda.is_available()
    block = 16 if has_gpu else 32  # block sizes that backends handle well
    length = documents.prompt_tokens + OUTPUTS
    pool = POOL_PROMPTS * (-(-length // block) + 1) * block
    device = int(device_share * documents.tokens) if has_gpu else 0
    settings: dict[str, Any] = {"enable_chunk_cache": engine == "reuse"}
    if engine == "reuse":
        total = torch.cuda.get_device_properties(0).total_memory if has_gpu else 1
        settings["chunk_cache_gpu_memory_fraction"] = device * shape.token_bytes / total
        settings["host_memory"] = int(host_share * documents.tokens * shape.token_bytes)
    else:
        pool += device
    llm = start(
        shape,
        **settings,
        max_model_len=length,
        max_num_batched_tokens=8192,
        block_size=block,
        num_gpu_blocks_override=pool // block,
    )
    params = {"recompute_ratio": ratio} if engine == "reuse" else None
    steps, rng = Steps(llm), documents.rng("queries")
    texts, system, batches = documents.texts(), documents.system(), list[dict[str, Any]]()
    steps.add(assemble(system, [], rng), 1 + OUTPUTS, params)  # the first steps compile and reserve
    steps.finish()
    drawn = new_combinations(documents, queries, rng)
    for number in range(queries // batch):
        requests = []
        for _ in range(batch):
            requests.append(steps.add(assemble(system, [texts[i] for i in next(drawn)], rng), OUTPUTS, params))
            steps.finish()
        row: dict[str, Any] = {"ttft_ms": statistics.mean(request.first_token_ms() for request in requests)}
        if engine == "reuse":
            tiers = Counter(chunk["tier"] for request in requests for chunk in request.chunks)
            row["hit_share"] = hit_share(requests, documents.per_query)
            row |= {f"{tier}_hits": tiers[tier] for tier in ("device", "host")}
        batches.append(row)
        tell(f"batch {number + 1} of {queries // batch}: first tokens after {row['ttft_ms']:.1f} ms")
    evictions = llm.get_stats()["evictions"] if engine == "reuse" else 0
    return {"machine": machine(), "batches": batches, "evictions": evictions}
