"""Cuts a prompt into system, chunks and question."""

import logging
import reprlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.token_bytes import TokenBytes, Tokenizer

logger = logging.getLogger(__name__)


class ChunkTokenParser:
    """Finds the chunks of a prompt by its separator, or takes them from explicit boundaries.

    The separator is searched for in the *bytes* the tokens stand for, so it is found whatever its
    edges merged with (``" # # Paris"`` ends in the token ``" Paris"``). A part starts with the first
    token that begins at or after its separator: the separator's tokens belong to the part they precede,
    and a token that holds both the end of a text and the start of a separator stays with that text.
    """

    def __init__(self, tokenizer: Tokenizer | None, separator: str | None = " # # ") -> None:
        """Without tokenizer or separator nothing is searched for; explicit boundaries still work."""
        self._tokenizer = tokenizer
        self._separator = (separator or "").encode()
        self._pieces: TokenBytes | None = None
        if separator == "":
            raise ConfigError("the chunk separator is empty; give it at least one character")
        if tokenizer is None or separator is None:
            return
        self._pieces = TokenBytes(tokenizer)
        if len(self._part_starts(tokenizer.encode(f"a{separator}b"))) != 2:
            raise ConfigError(
                f"the separator {separator!r} does not survive this model's tokenizer; choose text it can represent"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole prompt, exactly as ordinary generation would make them."""
        if self._tokenizer is None:
            raise PromptError("this engine has no tokenizer; pass token ids instead of text")
        return self._tokenizer.encode(text)

    def parse(
        self, prompt: str | Sequence[int], boundaries: Sequence[tuple[int, int]] | None = None
    ) -> ChunkedPrompt:
        """Parse text or token ids.

        ``boundaries`` replaces the search: ``(start, end)`` token ranges of *all* parts in order (system,
        chunks, question) that together cover the prompt. System and chunks may be empty, the question not.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else _plain_ints(prompt)
        if boundaries is not None:
            return self._from_boundaries(tokens, boundaries)
        if self._pieces is None or not tokens:
            return ChunkedPrompt(tuple(tokens), ())
        return self._from_separators(tokens)

    def document_tokens(self, document: str) -> tuple[int, ...]:
        """The tokens ``document`` has as a chunk in the middle of a prompt, its separator included."""
        separator = self._separator.decode()
        prompt = self.parse(f"a{separator}{document}{separator}b")
        if len(prompt.chunks) != 1:
            raise PromptError(f"a document must be one non-empty chunk, this one makes {len(prompt.chunks)} chunks")
        return prompt.tokens_of(prompt.chunks[0])

    def _from_separators(self, tokens: list[int]) -> ChunkedPrompt:
        parts = self._part_starts(tokens)
        edges = [*parts, (len(tokens), True)]
        spans = [Span(start, end) for (start, _), (end, _) in pairwise(edges)]
        chunks, empty = [], 0
        for span, (_, has_text) in zip(spans[1:-1], parts[1:-1], strict=True):
            if has_text and len(span) > 0:
                chunks.append(span)
            else:
                empty += 1
        if empty:
            logger.warning("skipped %d empty chunk(s) of a prompt; their separators are prefilled as text", empty)
        if chunks and chunks[-1].end == len(tokens):
            # The question merged into the chunk's last token. Something must be left to prefill.
            chunks.pop()
        return ChunkedPrompt(tuple(tokens), tuple(chunks))

    def _part_starts(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """First token of every part, and whether the part holds more than its separator and blanks."""
        assert self._pieces is not None
        pieces = [self._pieces[token] for token in tokens]
        text = b"".join(pieces)
        cuts = [0]
        at = text.find(self._separator)
        while at >= 0:
            cuts.append(at)
            at = text.find(self._separator, at + len(self._separator))
        if len(cuts) == 1:
            return [(0, True)]
        offsets = [0, *accumulate(map(len, pieces))]
        starts = []
        for index, cut in enumerate(cuts):
            body = cut + (len(self._separator) if index else 0)
            end = cuts[index + 1] if index + 1 < len(cuts) else len(text)
            starts.append((bisect_left(offsets, cut) if index else 0, bool(text[body:end].strip())))
        return starts

    @staticmethod
    def _from_boundaries(tokens: list[int], boundaries: Sequence[tuple[int, int]]) -> ChunkedPrompt:
        spans = [Span(int(start), int(end)) for start, end in boundaries]
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != len(tokens) or edges != sorted(edges):
            raise PromptError(
                f"boundaries {reprlib.repr(boundaries)} do not cover the {len(tokens)} tokens in order; "
                "give (start, end) of system, every chunk, question"
            )
        if len(spans) < 2 or len(spans[-1]) == 0:
            raise PromptError("boundaries need a system part (may be empty) and a question of at least one token")
        return ChunkedPrompt(tuple(tokens), tuple(span for span in spans[1:-1] if len(span) > 0))


def _plain_ints(tokens: Sequence[int]) -> list[int]:
    """Token ids as Python's integers; arrays and tensors yield numbers of their own kind."""
    if isinstance(tokens, list) and set(map(type, tokens)) == {int}:
        return tokens
    return array("q", tokens.tolist() if hasattr(tokens, "tolist") else tokens).tolist()
