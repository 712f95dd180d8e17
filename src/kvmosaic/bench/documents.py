"""Time to find named documents in a request, and in the prompt's tokens. Needs no engine."""

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.sources import find_sources
from kvmosaic.core.token_bytes import Tokenizer

DOCUMENTS = (5, 20, 60)
"""Number of documents per prompt, for each row."""
WORDS = 4000
"""Number of different words that documents are made of."""


def run(tokenizer: Tokenizer, tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    """A row for each number of documents in a prompt of about ``tokens`` tokens; medians of ``repeats``."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvwy", k=rng.randint(2, 9))) for _ in range(WORDS)]
    parser = ChunkTokenParser(tokenizer, None)
    per_word = len(tokenizer.encode(" ".join(words))) / WORDS
    rows = []
    for count in DOCUMENTS:
        length = max(20, int(tokens / per_word / count))
        documents = [" ".join(rng.choices(words, k=length)).capitalize() + "." for _ in range(count)]
        ids = tokenizer.encode("\n\n".join(["Be brief.", *documents, "What is it?"]))
        parts = [{"type": "text", "text": text} for text in (*documents, "What is it?")]
        body = json.dumps({"messages": [{"role": "user", "content": parts}]})
        assert len(parser.parse_named(ids, documents).prompt.chunks) == count
        request = _milliseconds(lambda body=body: find_sources(json.loads(body), ("parts",)), repeats)  # type: ignore[misc]
        prompt = _milliseconds(lambda ids=ids, names=documents: parser.parse_named(ids, names), repeats)  # type: ignore[misc]
        share = 1e4 / len(ids)
        rows.append(
            {
                "documents": count,
                "tokens": len(ids),
                "request_ms_per_10k": round(request * share, 2),
                "prompt_ms_per_10k": round(prompt * share, 2),
                "ms_per_10k": round((request + prompt) * share, 2),
            }
        )
    return {"rows": rows}


def _milliseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)
