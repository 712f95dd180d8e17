"""Fills documents ahead of time, for the engines that will serve them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.engines.chunk_cache import WarmState

Chunk = tuple[int, ...]


@dataclass
class WarmCounts:
    """Number of documents by outcome."""

    filled: int = 0
    known: int = 0
    """Stored already, or the same as another one."""
    too_long: int = 0
    """Too long to fit behind the sink prefix: such documents are never reused."""
    too_short: int = 0
    """Shorter than the minimum for a chunk: such documents are never reused."""
    filled_tokens: int = 0


class Warmer(ABC):
    """An engine that fills documents into tiers that outlive it. Stored documents are neither read nor filled again,
    so an interrupted run can simply be restarted."""

    parser: ChunkTokenParser

    @abstractmethod
    def states(self, chunks: Sequence[Chunk]) -> list[WarmState]:
        """The state of each document, as a chunk, after everything filled so far is written."""

    @abstractmethod
    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Fill and store documents that are missing."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine."""

    def warm(self, documents: Sequence[Chunk], counts: WarmCounts) -> None:
        """Store these documents and count the outcomes. ``parser.document_tokens`` makes chunks of texts."""
        chunks = list(dict.fromkeys(documents))
        states = dict(zip(chunks, self.states(chunks), strict=True))
        missing = [chunk for chunk, state in states.items() if state == "missing"]
        if missing:
            self.fill(missing)
        found = [states[document] for document in documents]
        counts.filled += len(missing)
        counts.filled_tokens += sum(map(len, missing))
        counts.too_long += found.count("too-long")
        counts.too_short += found.count("too-short")
        counts.known += found.count("kept") + found.count("missing") - len(missing)
