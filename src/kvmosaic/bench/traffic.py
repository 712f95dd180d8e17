"""Made-up RAG traffic. The same seed gives the same traffic."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmosaic.core.errors import ConfigError

SYSTEM_TOKENS = 40
QUESTION_TOKENS = 20
ZIPF = 1.0
"""Exponent s of Zipf's law: the document of rank r is requested in proportion to r to the power of -s."""


class Prompt(NamedTuple):
    """Token ids, and the boundaries (begin, end) of system prompt, documents and question."""

    ids: list[int]
    boundaries: list[tuple[int, int]]


@dataclass(frozen=True)
class Corpus:
    """Documents of the same length, and the number of documents per query."""

    documents: int = 200
    document_tokens: int = 512
    per_query: int = 14
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_query > self.documents:
            raise ConfigError(f"{self.per_query} documents per query: there are only {self.documents}")

    @property
    def tokens(self) -> int:
        return self.documents * self.document_tokens

    @property
    def prompt_tokens(self) -> int:
        return SYSTEM_TOKENS + self.per_query * self.document_tokens + QUESTION_TOKENS

    def rng(self, purpose: str) -> random.Random:
        """A random number generator for one purpose, independent of those for other purposes."""
        return random.Random(f"{self.seed} {purpose}")

    def texts(self) -> list[list[int]]:
        """The token ids of every document."""
        rng = self.rng("documents")
        return [random_tokens(rng, self.document_tokens) for _ in range(self.documents)]

    def system(self) -> list[int]:
        """The system prompt of all queries."""
        return random_tokens(self.rng("system"), SYSTEM_TOKENS)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 100000) for _ in range(count)]


def assemble(system: list[int], documents: Sequence[list[int]], rng: random.Random) -> Prompt:
    """A prompt of these documents in this order, and a new question."""
    ids: list[int] = []
    boundaries: list[tuple[int, int]] = []
    for part in (system, *documents, random_tokens(rng, QUESTION_TOKENS)):
        boundaries.append((len(ids), len(ids) + len(part)))
        ids += part
    return Prompt(ids, boundaries)


def popular(corpus: Corpus, rng: random.Random) -> Iterator[list[int]]:
    """Endless queries, as numbers of documents in random order. The documents of a query differ; each is drawn by
    Zipf's law from those left."""
    while True:
        # The documents with the shortest exponential waiting times, at these rates, are such a draw.
        waits = [(rng.expovariate(1.0) * (number + 1) ** ZIPF, number) for number in range(corpus.documents)]
        drawn = [number for _, number in sorted(waits)[: corpus.per_query]]
        rng.shuffle(drawn)
        yield drawn


def new_combinations(corpus: Corpus, count: int, rng: random.Random) -> Iterator[list[int]]:
    """``count`` queries, as numbers of documents in random order. All documents are equally popular; no set comes
    twice."""
    if math.comb(corpus.documents, corpus.per_query) < count:
        raise ConfigError(f"{corpus.documents} documents make fewer than {count} combinations of {corpus.per_query}")
    seen: set[frozenset[int]] = set()
    while len(seen) < count:
        drawn = rng.sample(range(corpus.documents), corpus.per_query)
        if frozenset(drawn) not in seen:
            seen.add(frozenset(drawn))
            yield drawn


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Arrival times of requests, in seconds: a Poisson process of ``rate`` per second, with at least one request."""
    times = [rng.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1] or [0.0]
