"""What a request is told about its chunks."""

from collections.abc import Sequence
from typing import Any

from kvmosaic.engines.results import ChunkReport, ChunkStatus, Fallback
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror

MISSING = "missing"
"""Reason of a chunk that is in no tier."""


class Reports:
    """What those requests are told that want a report and may have one, while they run."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        self._notes: dict[str, dict[str, Any]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._told

    def begin(self, request_id: str, **notes: Sequence[object]) -> None:
        """A request wants a report, which has these ``notes`` whatever becomes of it, but for empty ones."""
        self._told[request_id] = {"mode": "plain", "fallback_reason": None}
        self._notes[request_id] = {name: list(each) for name, each in notes.items() if each}

    def add(self, request_id: str, **told: Any) -> None:
        """What to tell a request that is served plainly, if it wants to know."""
        if request_id in self._told:
            self._told[request_id].update(told)

    def take(self, request_id: str, reused: dict[str, Any]) -> dict[str, Any] | None:
        """The report of a request that is over, if it wants one; ``reused`` is what was reused of it, if anything."""
        if request_id not in self._told:
            return None
        told, notes = self._told.pop(request_id), self._notes.pop(request_id)
        return {**(reused or told), **notes}


def reuse_report(request: ChunkRequest, local: int, mirror: StoreMirror, lacking: ChunkStatus) -> dict[str, Any]:
    """What is about to be reused of a request, of which vLLM's prefix cache has the first ``local`` tokens. Chunks
    that are in no tier become ``lacking``."""
    chunks, reused = [], 0.0
    for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
        if span.end <= local:
            chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
            continue
        tier = None if digest in request.filled else request.fetched_from.get(digest) or mirror.tier(digest)
        chunks.append(ChunkReport(span, "cached" if tier else lacking, tier, None if tier else MISSING))
        reused += (span.end - max(span.start, local)) * (1 - request.ratio) if tier else 0
    return {
        "mode": "fill" if any(chunk.status == "filled" for chunk in chunks) else "reuse",
        "prefix_tokens": local,
        "reused_tokens": int(reused),
        "chunks": [chunk.as_dict() for chunk in chunks],
    }


def plain_chunks(request: ChunkRequest, local: int, mirror: StoreMirror, why: Fallback) -> list[dict[str, Any]]:
    """What becomes of the chunks of a request that is served plainly. The reason of those that are stored is ``why``
    they are not reused."""
    chunks = []
    for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
        if span.end <= local:
            chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
        else:
            reason = why.value if mirror.has(digest) else MISSING
            chunks.append(ChunkReport(span, "prefilled", None, reason))
    return [chunk.as_dict() for chunk in chunks]
