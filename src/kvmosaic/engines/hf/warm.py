"""Filling documents ahead of time with the embedded engine."""

from collections.abc import Sequence
from typing import Any

from kvmosaic.engines.chunk_cache import WarmState
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.warm import Chunk, Warmer

SHORT = 1
"""Prompt length that documents are filled for. If a model has several rope tables, those of short prompts count."""


class HFWarmer(Warmer):
    """A transformers model in this process."""

    def __init__(self, model: str, dtype: str, **settings: Any) -> None:
        self._llm = LLM(model, dtype=dtype, **settings)
        self._cache = self._llm.chunk_cache  # says why, if it is off
        self.parser = self._llm.parser

    def states(self, chunks: Sequence[Chunk]) -> list[WarmState]:
        return self._cache.warm_states(chunks, SHORT)

    def fill(self, chunks: Sequence[Chunk]) -> None:
        keys = [self._cache.key(chunk, self._cache.sink, SHORT) for chunk in chunks]
        self._cache.fill(dict(zip(keys, chunks, strict=True)), self._cache.sink, SHORT)

    def close(self) -> None:
        self._llm.close()
