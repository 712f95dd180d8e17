"""A prompt divided into system, chunks and question."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvmosaic.core.errors import PromptError


@dataclass(frozen=True)
class Span:
    """Token positions ``start .. end-1`` of a prompt."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def positions(self) -> range:
        return range(self.start, self.end)


@dataclass(frozen=True)
class ChunkedPrompt:
    """A parsed prompt. Tokens in no chunk (system, question, text between chunks) are *fresh*: every request computes
    them itself, and they see everything before them."""

    token_ids: tuple[int, ...]
    chunks: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise PromptError("the prompt is empty; give at least one token")
        end = 0
        for span in self.chunks:
            if not end <= span.start < span.end < len(self.token_ids):
                raise PromptError(
                    f"{span} must be a non-empty chunk after the previous one and before the last token"
                )
            end = span.end

    @property
    def system(self) -> Span:
        """The tokens before the first chunk; empty when the prompt has no chunks."""
        return Span(0, self.chunks[0].start if self.chunks else 0)

    @property
    def question(self) -> Span:
        """The tokens after the last chunk; the whole prompt when it has no chunks."""
        return Span(self.chunks[-1].end if self.chunks else 0, len(self.token_ids))

    @cached_property
    def token_array(self) -> "array[int]":
        """The token ids as 32-bit numbers, for uses that need bytes. Computed once and sent with the prompt."""
        return array("i", self.token_ids)

    def tokens_of(self, span: Span) -> tuple[int, ...]:
        return self.token_ids[span.start : span.end]

    def fresh_positions(self) -> Iterator[int]:
        """Positions of all tokens that belong to no chunk, ascending."""
        start = 0
        for span in self.chunks:
            yield from range(start, span.start)
            start = span.end
        yield from range(start, len(self.token_ids))
