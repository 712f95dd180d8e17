"""What a request is told about its chunks."""

from typing import Any

from kvmosaic.engines.results import ChunkReport, ChunkStatus
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror


def reuse_report(request: ChunkRequest, local: int, mirror: StoreMirror, lacking: ChunkStatus) -> dict[str, Any]:
    """What is about to be reused of a request, of which vLLM's prefix cache has the first ``local`` tokens. Chunks
    that are in no tier become ``lacking``."""
    chunks, reused = [], 0.0
    for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
        if span.end <= local:
            chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
            continue
        tier = None if digest in request.filled else request.fetched_from.get(digest) or mirror.tier(digest)
        chunks.append(ChunkReport(span, "cached" if tier else lacking, tier, None if tier else "missing"))
        reused += (span.end - max(span.start, local)) * (1 - request.ratio) if tier else 0
    return {
        "mode": "fill" if any(chunk.status == "filled" for chunk in chunks) else "reuse",
        "prefix_tokens": local,
        "reused_tokens": int(reused),
        "chunks": [chunk.as_dict() for chunk in chunks],
    }
