"""Checks prompts of any kind and cuts them into chunks."""

import operator
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvmosaic.core.errors import PromptError
from kvmosaic.core.parser import ChunkTokenParser, NamedPrompt
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.chat import ChatPrompt

Prompt = str | Sequence[int] | ChunkedPrompt | ChatPrompt


class ReadPrompt(NamedTuple):
    """A prompt that the model can process."""

    prompt: ChunkedPrompt
    absent: tuple[int, ...]
    """Indices of its documents that occur nowhere in it."""
    seconds: float
    """The time that reading took, which counts towards its TTFT."""


class PromptReader:
    """Reads prompts for a model of ``vocabulary`` token ids and ``max_positions``, if these are limited."""

    def __init__(self, parser: ChunkTokenParser, vocabulary: int, max_positions: int | None) -> None:
        self._parser = parser
        self._vocabulary = vocabulary
        self._max_positions = max_positions

    def read(self, index: int, source: Prompt, documents: Sequence[str], max_tokens: int, search: bool) -> ReadPrompt:
        """The prompt ``source`` with room for ``max_tokens`` more. If ``search``, ``documents`` are chunks of it."""
        start = time.perf_counter()
        question, seams = None, list[tuple[str, str]]()
        if isinstance(source, ChatPrompt):
            documents, question, seams = [*source.documents, *documents], source.question, list(source.seams)
            source = source.token_ids
        tokens = source.token_ids if isinstance(source, ChunkedPrompt) else self._tokens(index, source)
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise PromptError(f"prompt {index}: token ids must be between 0 and {self._vocabulary - 1}")
        if isinstance(source, ChunkedPrompt):
            named = NamedPrompt(source, ())
        elif search:
            named = self._parser.parse_named(tokens, documents, question, seams)
        else:
            named = NamedPrompt(ChunkedPrompt(tuple(tokens), ()), ())
        if self._max_positions is not None and len(tokens) + max_tokens > self._max_positions:
            raise PromptError(
                f"prompt {index}: {len(tokens)} tokens + max_tokens {max_tokens} exceed the model's "
                f"{self._max_positions} positions; shorten one of them"
            )
        return ReadPrompt(named.prompt, named.absent, time.perf_counter() - start)

    def _tokens(self, index: int, source: str | Sequence[int]) -> list[int]:
        if isinstance(source, str):
            return self._parser.encode(source)
        try:
            if isinstance(source, (bytes, bytearray)):
                raise TypeError
            return [operator.index(token) for token in source]
        except TypeError:
            raise PromptError(f"prompt {index} must be text, a list of token ids or a ChunkedPrompt") from None
