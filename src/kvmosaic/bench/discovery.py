"""How much of unmarked traffic ``chunk_sources: auto`` finds, and what looking for it costs. No engine is needed."""

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
"""Tokens of a block of the prefix cache that is imagined beside it."""
CACHED_TOKENS = 10**6
"""Tokens that this cache holds."""
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
    """What is found of ``prompts``, sent one after the other, and each of their runs stored before the next. Shares
    are of the tokens behind the prefix cache: those of documents, those of documents that two prompts had before and
    of which nothing is in that cache, and those of runs that were stored. Times are of one core."""
    discovery = Discovery(MARKERS, CACHED_TOKENS)
    discovery.find(range(10**5))  # makes its tables as long as they will be
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
    """What a span says."""
    return ids[span.start : span.end].tobytes()


def _cached(ids: "array[int]", seen: set[int]) -> int:
    """How many tokens of a prompt begin an earlier one, in full blocks; from now on, all of them do."""
    cached = digest = 0
    for end in range(BLOCK, len(ids), BLOCK):
        digest = hash((digest, ids[end - BLOCK : end].tobytes()))
        if digest in seen and cached == end - BLOCK:
            cached = end
        seen.add(digest)
    return cached
