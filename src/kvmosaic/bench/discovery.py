"""How much repeated text ``chunk_sources: auto`` finds in unmarked traffic, and at what cost. Needs no engine."""

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from kvmosaic.bench.unmarked import MARKERS, Unmarked, agent, chat, made_up, rag
from kvmosaic.core.discovery import Discovery
from kvmosaic.core.prompt import Span

BLOCK = 16
"""Block size of the simulated prefix cache, in tokens."""
CACHED_TOKENS = 10**6
"""Size of the engine's prefix cache that discovery assumes, in tokens."""
DOCUMENTS = 60

KINDS: dict[str, Callable[[Sequence[list[int]], random.Random], Iterator[Unmarked]]] = {
    "RAG, other order": rag,
    "RAG, numbered": lambda documents, rng: rag(documents, rng, labels=True),
    "chat": chat,
    "agent": agent,
}


def run(prompts: int, seed: int, documents: Sequence[list[int]] | None = None) -> dict[str, Any]:
    """A row for each kind of traffic, over ``prompts`` prompts with ``documents``, or with made-up ones."""
    rows = []
    for kind, traffic in KINDS.items():
        rng = random.Random(f"{seed} {kind}")
        texts = made_up(DOCUMENTS, rng) if documents is None else documents
        rows.append({"traffic": kind, **measure(islice(traffic(texts, rng), prompts))})
    return {"rows": rows}


def measure(prompts: Iterator[Unmarked]) -> dict[str, Any]:
    """Send ``prompts`` one after the other, store the runs of each before the next, and measure what is found. Shares
    are of the tokens that the prefix cache does not cover. ``in_documents``: tokens of documents. ``seen_twice``:
    tokens of documents that at least two earlier prompts had, and of which the prefix cache covers nothing.
    ``found``: tokens of stored runs. Times are CPU time."""
    discovery = Discovery(MARKERS, CACHED_TOKENS)
    discovery.find(range(10**5))  # grows its tables to their full length before anything is timed
    seen: set[int] = set()
    stored: set[bytes] = set()
    visits: Counter[bytes] = Counter()
    totals = {"tokens": 0, "new": 0, "documents": 0, "known": 0, "found": 0}
    spent = 0.0
    sent = 0

    def is_stored(span: Span, _: int) -> bool:
        return _text(ids, span) in stored

    for prompt in prompts:
        ids = array("i", prompt.ids)
        begin = time.process_time()
        runs = discovery.find(ids, is_stored=is_stored)
        spent += time.process_time() - begin
        sent += 1
        start = _cached(ids, seen)
        found = [span for span in runs.chunks if _text(ids, span) in stored]
        places = [(max(start, first), end) for first, end in prompt.documents if end > start]
        totals["tokens"] += len(ids)
        totals["new"] += len(ids) - start
        totals["documents"] += sum(end - first for first, end in places)
        totals["known"] += sum(end - first for first, end in places if visits[ids[first:end].tobytes()] > 1)
        totals["found"] += sum(max(0, span.end - max(start, span.start)) for span in found)
        stored.update(_text(ids, span) for span in (*runs.chunks, *runs.to_fill))
        visits.update(ids[first:end].tobytes() for first, end in prompt.documents)
    return {
        "prompts": sent,
        "tokens": totals["tokens"],
        "behind_prefix": totals["new"],
        "in_documents": round(totals["documents"] / totals["new"], 3),
        "seen_twice": round(totals["known"] / totals["new"], 3),
        "found": round(totals["found"] / totals["new"], 3),
        "ms_per_prompt": round(1e3 * spent / sent, 2),
        "ms_per_10k": round(1e7 * spent / totals["tokens"], 2),
    }


def _text(ids: "array[int]", span: Span) -> bytes:
    """The tokens of a span, as bytes."""
    return ids[span.start : span.end].tobytes()


def _cached(ids: "array[int]", seen: set[int]) -> int:
    """Number of tokens, in full blocks, with which both this prompt and an earlier one begin. Adds the prompt to
    ``seen``."""
    cached = digest = 0
    for end in range(BLOCK, len(ids), BLOCK):
        digest = hash((digest, ids[end - BLOCK : end].tobytes()))
        if digest in seen and cached == end - BLOCK:
            cached = end
        seen.add(digest)
    return cached
