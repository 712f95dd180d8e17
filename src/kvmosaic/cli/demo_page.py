"""``kvmosaic demo --html``: the session as a page of mosaics, drawn as a server's page draws its requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvmosaic.cli.demo_data import DOCUMENTS, Request


class Compared(NamedTuple):
    """A request, its answer, and the answer of its own full prefill."""

    request: Request
    ours: Any
    full: Any


def session_page(model: str, compared: Sequence[Compared], held: Mapping[str, tuple[int, int]]) -> str:
    """The page. ``held``: number of entries in each tier, and their bytes."""
    from kvmosaic.engines.mosaic import file_page

    hits, misses, tokens = Counter[str](), Counter[str](), Counter[str]()
    for item in compared:
        for chunk in item.ours.chunks:
            if chunk.status == "cached":
                hits[chunk.tier] += 1
            else:
                misses[chunk.reason] += 1
                tokens["filled"] += len(chunk.span)
        tokens["recomputed"] += item.ours.recomputed_tokens
        tokens["reused"] += item.ours.cached_tokens - item.ours.recomputed_tokens
    stats = {
        "counts": {"chunk_hits": hits, "chunk_misses": misses, "tokens": tokens},
        "tiers": {tier: {"entries": entries, "bytes": nbytes} for tier, (entries, nbytes) in held.items()},
        "prompt_tokens": sum(item.ours.prompt_tokens for item in compared),
        "prefix_tokens": 0,
        "has_statistics": True,
    }
    return file_page(f"kvmosaic demo: {model}", stats, [_fields(item) for item in compared])


def _fields(item: Compared) -> dict[str, Any]:
    """A request in the form of a server's answers."""
    ours, request = item.ours, item.request
    return {
        "title": request.title,
        "prompt_tokens": ours.prompt_tokens,
        "cached_tokens": 0,
        "first_token_ms": ours.ttft_ms,
        "full_first_token_ms": item.full.ttft_ms,
        "report": {
            "mode": ours.mode,
            "fallback_reason": ours.fallback_reason,
            "recompute_ratio": request.ratio,
            "reused_tokens": ours.cached_tokens - ours.recomputed_tokens,
            "recomputed": ours.recomputed,
            "probed": ours.probed,
            "chunks": [chunk.as_dict() for chunk in ours.chunks],
        },
        "texts": [f"{DOCUMENTS[name][:80]}…" for name in request.documents],
        "more": {"question": request.question, "answer": ours.text.strip(), "full prefill": item.full.text.strip()},
    }
