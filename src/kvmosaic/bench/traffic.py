"""Made-up RAG traffic, the same for everybody who asks with the same seed."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmosaic.core.errors import ConfigError

SYSTEM_TOKENS = 40
QUESTION_TOKENS = 20
ZIPF = 1.0
"""The document of rank r is asked for in proportion to r to the power of minus this."""


class Prompt(NamedTuple):
    """Token ids, and where system, documents and question begin and end."""

    ids: list[int]
    boundaries: list[tuple[int, int]]


@dataclass(frozen=True)
class Corpus:
    """Documents, all of one length, and how many of them a query has."""

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
        """Random numbers for one purpose, which do not depend on what others draw."""
        return random.Random(f"{self.seed} {purpose}")

    def texts(self) -> list[list[int]]:
        """Every document."""
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
    """Endless queries: different documents, by number, each drawn by Zipf's law from those left; in random order."""
    while True:
        # Of exponential waiting times with these rates the shortest belong to such a draw.
        waits = [(rng.expovariate(1.0) * (number + 1) ** ZIPF, number) for number in range(corpus.documents)]
        drawn = [number for _, number in sorted(waits)[: corpus.per_query]]
        rng.shuffle(drawn)
        yield drawn


def new_combinations(corpus: Corpus, count: int, rng: random.Random) -> Iterator[list[int]]:
    """``count`` queries, by numbers of documents: all equally popular, in random order, no set of them twice."""
    if math.comb(corpus.documents, corpus.per_query) < count:
        raise ConfigError(f"{corpus.documents} documents make no {count} combinations of {corpus.per_query}")
    seen: set[frozenset[int]] = set()
    while len(seen) < count:
        drawn = rng.sample(range(corpus.documents), corpus.per_query)
        if frozenset(drawn) not in seen:
            seen.add(frozenset(drawn))
            yield drawn


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """When requests come, in seconds: a Poisson process of ``rate`` per second; at least one request."""
    times = [rng.expovariate(rate)]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:-1] or [0.0]
