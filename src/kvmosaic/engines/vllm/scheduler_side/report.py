"""Reports to requests about their chunks."""

from collections.abc import Sequence
from typing import Any

from kvmosaic.engines.results import ChunkReport, ChunkStatus, Fallback
from kvmosaic.engines.vllm.messages import Recomputed
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats

MISSING = "missing"
"""Reason that is reported for a chunk that is in no tier."""


class Reports:
    """Reports of current requests that asked for one and may have it."""

    def __init__(self, stats: ChunkStats) -> None:
        self._stats = stats
        self._told: dict[str, dict[str, Any]] = {}
        self._notes: dict[str, dict[str, Any]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._told

    def begin(self, request_id: str, **notes: Sequence[object]) -> None:
        """Begin the report of a request. It has the ``notes`` that are not empty, however the request is served."""
        self._told[request_id] = {"mode": "plain", "fallback_reason": None}
        self._notes[request_id] = {name: list(each) for name, each in notes.items() if each}

    def add(self, request_id: str, **told: Any) -> None:
        """Add fields to the report of a request that is served plainly, if it asked for one."""
        if request_id in self._told:
            self._told[request_id].update(told)

    def fall_back(self, request_id: str, reason: Fallback) -> None:
        """Count and report a request with chunks that is served plainly."""
        self.add(request_id, fallback_reason=reason.value)
        self._stats.count("fallbacks", reason)
        self._stats.count("requests", "plain")

    def take(self, request_id: str, reused: dict[str, Any]) -> dict[str, Any] | None:
        """The report of a request that is over, if it asked for one. ``reused`` is the report on its reused chunks,
        if any."""
        if request_id not in self._told:
            return None
        told, notes = self._told.pop(request_id), self._notes.pop(request_id)
        return {**(reused or told), **notes}


def reuse_report(request: ChunkRequest, local: int, mirror: StoreMirror, lacking: ChunkStatus) -> dict[str, Any]:
    """The report on the chunks that are about to be reused in a request, of which vLLM's prefix cache has the first
    ``local`` tokens. Chunks that are in no tier get the status ``lacking``."""
    chunks, reused = [], 0.0
    for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
        if span.end <= local:
            chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
            continue
        is_found = digest not in request.filled and request.finds(digest, mirror)
        tier = (request.fetched_from.get(digest) or mirror.tier(digest)) if is_found else None
        status = "cached" if tier else lacking if mirror.can_store(len(span)) else "prefilled"
        chunks.append(ChunkReport(span, status, tier, None if tier else MISSING))
        reused += (span.end - max(span.start, local)) * (1 - request.ratio) if tier else 0
    return {
        "mode": "fill" if any(chunk.status == "filled" for chunk in chunks) else "reuse",
        "recompute_ratio": request.ratio,
        **({"policy": request.policy} if 0 < request.ratio < 1 else {}),
        "prefix_tokens": local,
        "reused_tokens": int(reused),
        "chunks": [chunk.as_dict() for chunk in chunks],
    }


def choice_report(recomputed: Recomputed) -> dict[str, Any]:
    """The report on the tokens that were recomputed, and on how they were chosen."""
    told: dict[str, Any] = {"recomputed": recomputed.spans}
    return told if recomputed.probed is None else told | {"probed": recomputed.probed}


def plain_chunks(request: ChunkRequest, local: int, mirror: StoreMirror, why: Fallback) -> list[dict[str, Any]]:
    """The report on the chunks of a request that is served plainly. For stored chunks, the reason is ``why`` they are
    not reused."""
    chunks = []
    for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
        if span.end <= local:
            chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
        else:
            reason = why.value if mirror.has(digest) else MISSING
            chunks.append(ChunkReport(span, "prefilled", None, reason))
    return [chunk.as_dict() for chunk in chunks]
