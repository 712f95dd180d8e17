"""Cuts a prompt into system, chunks and question."""

import logging
import reprlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

import numpy as np

from kvmosaic.core.documents import find_documents
from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.limits import MAX_CHUNKS, shown
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.token_bytes import PromptText, PromptTexts, TokenBytes, Tokenizer
from kvmosaic.core.turns import turn_ends, turn_markers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt in which documents were looked for."""

    prompt: ChunkedPrompt
    absent: tuple[int, ...]
    """Indices of the documents that do not occur in the prompt."""


class ChunkTokenParser:
    """Finds the chunks of a prompt: documents that are named, parts between separators, or explicit boundaries.

    The separator is searched for in the *bytes* the tokens stand for. It is found even if its edges merged with
    neighbouring text (``" # # Paris"`` ends in the token ``" Paris"``). A part starts with the first token that
    begins at or after its separator. The separator's tokens belong to the part that follows them. A token that
    contains both the end of a text and the start of a separator stays with that text.

    A part that crosses a turn of a conversation is not a chunk: it contains an earlier question and its answer, which
    have a meaning only at their position.
    """

    def __init__(self, tokenizer: Tokenizer | None, separator: str | None = None, min_chunk_tokens: int = 1) -> None:
        """Without a tokenizer only explicit boundaries work; without a separator, also named documents. Chunks
        shorter than ``min_chunk_tokens`` are ordinary text, and so are chunks beyond the first ``MAX_CHUNKS``."""
        self._tokenizer = tokenizer
        self._separator = (separator or "").encode()
        self._min_tokens = min_chunk_tokens
        self._pieces = None if tokenizer is None else TokenBytes(tokenizer)
        self._texts = None if self._pieces is None else PromptTexts(self._pieces)
        self._markers = turn_markers(tokenizer)
        self._is_marker = np.zeros(max(self._markers, default=-1) + 2, dtype=bool)
        """By token id; the last item stands for all larger ids."""
        self._is_marker[list(self._markers)] = True
        if tokenizer is None or not separator:
            return
        if len(self._part_starts(self._text(tokenizer.encode(f"a{separator}b")), None)) != 2:
            raise ConfigError(
                f"the separator {shown(separator)} does not survive this model's tokenizer; choose text that it can "
                "represent"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole prompt, exactly as in ordinary generation."""
        if self._tokenizer is None:
            raise PromptError("this engine has no tokenizer; pass token ids instead of text")
        return self._tokenizer.encode(text)

    def parse(
        self, prompt: str | Sequence[int], boundaries: Sequence[tuple[int, int]] | None = None
    ) -> ChunkedPrompt:
        """Parse text or token ids.

        ``boundaries`` replaces the search: ``(start, end)`` token ranges of system, chunks and question, in order.
        The system starts at 0 and the question ends with the prompt. Tokens between two ranges are ordinary text. The
        system and the chunks may be empty, but not the question.
        """
        if boundaries is None:
            return self.parse_named(prompt).prompt
        return self._worth_storing(self._from_boundaries(self._ids(prompt), boundaries))

    def parse_named(
        self,
        prompt: str | Sequence[int],
        documents: Sequence[str] = (),
        question: str | None = None,
        seams: Sequence[tuple[str, str]] = (),
    ) -> NamedPrompt:
        """Parse text or token ids in which ``documents`` are chunks at any position. A separator, if there is one,
        creates further chunks, but only before the first occurrence of ``question``. No document is found across
        one of ``seams``, where questions begin."""
        tokens = tuple(self._ids(prompt))
        if self._texts is None or not tokens or not (documents or self._separator):
            return NamedPrompt(ChunkedPrompt(tokens, ()), tuple(range(len(documents))))
        ids = _numbers(tokens)
        text = self._texts.of(ids)
        found = find_documents(text, documents, self._normalize, seams)
        # The last token must be left to prefill. Text that contains a role marker has a meaning only at its position.
        bounds = [*np.flatnonzero(self._is_marker.take(ids, mode="clip")).tolist(), len(tokens) - 1]
        chunks = [span for span in found.spans if span.end <= bounds[bisect_left(bounds, span.start)]]
        if self._separator:
            chunks = _with(chunks, self._separated(tokens, text, question))
        return NamedPrompt(self._worth_storing(ChunkedPrompt(tokens, tuple(chunks))), found.absent)

    def document_tokens(self, document: str) -> tuple[int, ...]:
        """The tokens that ``document`` has as a chunk in the middle of a prompt, even if these are too few to be
        stored. They include a separator, if one is set. Otherwise they are the document's core, if there is one."""
        if self._separator:
            separator = self._separator.decode()
            tokens = self.encode(f"a{separator}{document}{separator}b")
            chunks: Sequence[Span] = self._separated(tokens, self._text(tokens), None)
        else:
            tokens = self.encode(f"a\n\n{document}\n\nb")
            chunks = find_documents(self._text(tokens), [document], self._normalize).spans
            if not chunks:
                return ()
        if len(chunks) != 1:
            raise PromptError(f"a document must be one non-empty chunk, this one makes {len(chunks)} chunks")
        return tuple(tokens[chunks[0].start : chunks[0].end])

    def turn_ends(self, prompt: ChunkedPrompt) -> list[int]:
        """For each chunk of ``prompt``, the position where its turn ends, after its question. If no text follows the
        last chunk of a message, the question is in an unknown other message, and this is the end of the prompt."""
        tokens = prompt.token_ids
        ends = turn_ends(tokens, self._markers, [span.end for span in prompt.chunks])
        last = {end: span.end for span, end in zip(prompt.chunks, ends, strict=True)}
        asked = {end: end if self._has_text(tokens[start:end]) else len(tokens) for end, start in last.items()}
        return [asked[end] for end in ends]

    def _has_text(self, tokens: Sequence[int]) -> bool:
        """Whether tokens contain more than separators and whitespace."""
        if self._pieces is None:
            return bool(tokens)
        text = b"".join(self._pieces[token] for token in tokens)
        return bool((text.replace(self._separator, b"") if self._separator else text).strip())

    def _worth_storing(self, prompt: ChunkedPrompt) -> ChunkedPrompt:
        """The prompt, without chunks that are too short and chunks beyond the limit."""
        chunks = tuple(span for span in prompt.chunks if len(span) >= self._min_tokens)
        if len(chunks) > MAX_CHUNKS:
            logger.warning(
                "a prompt has %d chunks; those after the first %d are treated as text", len(chunks), MAX_CHUNKS
            )
            chunks = chunks[:MAX_CHUNKS]
        return prompt if chunks == prompt.chunks else ChunkedPrompt(prompt.token_ids, chunks)

    def _separated(self, tokens: Sequence[int], text: PromptText, question: str | None) -> list[Span]:
        """The parts between separators, except for the first, the last, empty ones, and those with a role marker."""
        parts = self._part_starts(text, question)
        edges = [*parts, (len(tokens), True)]
        spans = [Span(start, end) for (start, _), (end, _) in pairwise(edges)]
        chunks, empty = [], 0
        for span, (_, has_text) in zip(spans[1:-1], parts[1:-1], strict=True):
            if not has_text or len(span) == 0:
                empty += 1
            elif self._is_of_one_turn(tokens, span):
                chunks.append(span)
        if empty:
            logger.warning("skipped %d empty chunk(s) of a prompt; their separators are prefilled as text", empty)
        if chunks and chunks[-1].end == len(tokens):
            # The question merged into the chunk's last token, and at least one token must be left to prefill.
            chunks.pop()
        return chunks

    def _part_starts(self, text: PromptText, question: str | None) -> list[tuple[int, bool]]:
        """First token of every part, and whether the part contains more than its separator and whitespace."""
        limit = self._question_at(text, question)
        cuts = [0]
        at = text.bytes.find(self._separator)
        while at >= 0 and at + len(self._separator) <= limit:
            cuts.append(at)
            at = text.bytes.find(self._separator, at + len(self._separator))
        starts = []
        for index, cut in enumerate(cuts):
            body = cut + (len(self._separator) if index else 0)
            end = cuts[index + 1] if index + 1 < len(cuts) else len(text.bytes)
            first = int(text.starts.searchsorted(cut)) if index else 0
            starts.append((first, bool(text.bytes[body:end].strip())))
        return starts

    def _question_at(self, text: PromptText, question: str | None) -> int:
        """Byte offset from which separators are ignored: the start of the question. If the question is not found, all
        separators are ignored, because an end user may have written any of them."""
        if not question:
            return len(text.bytes)
        if len(question) > len(text.bytes):  # it is not there, and clients may send any length
            return 0
        written = {question, self._normalize(question)}
        places = [text.bytes.find(each.encode(errors="surrogatepass")) for each in written]
        return min((place for place in places if place >= 0), default=0)

    def _is_of_one_turn(self, tokens: Sequence[int], span: Span) -> bool:
        return self._markers.isdisjoint(tokens[span.start : span.end])

    def _normalize(self, document: str) -> str:
        """A document as the tokenizer's normaliser returns it, with spaces instead of ``▁``."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        try:
            return document if normalizer is None else normalizer.normalize_str(document).replace("▁", " ").strip()
        except UnicodeEncodeError:  # a single surrogate, which no prompt contains
            return document

    def _text(self, tokens: Sequence[int]) -> PromptText:
        assert self._texts is not None  # there is a tokenizer, as it made the tokens
        return self._texts.of(_numbers(tokens))

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids as Python integers; the items of arrays and tensors have types of their own."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        return prompt.tolist() if hasattr(prompt, "tolist") else prompt

    @staticmethod
    def _from_boundaries(tokens: Sequence[int], boundaries: Sequence[tuple[int, int]]) -> ChunkedPrompt:
        spans = [Span(int(start), int(end)) for start, end in boundaries]
        edges = [edge for span in spans for edge in (span.start, span.end)]
        if edges[:1] != [0] or edges[-1] != len(tokens) or edges != sorted(edges):
            raise PromptError(
                f"boundaries {reprlib.repr(boundaries)} are not in order, or do not begin and end with the "
                f"{len(tokens)} tokens; give (start, end) of system, every chunk, question"
            )
        if len(spans) < 2 or len(spans[-1]) == 0:
            raise PromptError("boundaries need a system part (may be empty) and a question of at least one token")
        return ChunkedPrompt(tuple(tokens), tuple(span for span in spans[1:-1] if len(span) > 0))


def _with(chunks: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """``chunks``, and the spans of ``others`` that overlap none of them. Both are ascending."""
    starts = [span.start for span in chunks]
    free = []
    for span in others:
        index = bisect_left(starts, span.end)
        if index == 0 or chunks[index - 1].end <= span.start:
            free.append(span)
    return sorted([*chunks, *free], key=lambda span: span.start)


def _numbers(tokens: Sequence[int]) -> np.ndarray:
    """Token ids as an array, ``[tokens]`` int64. Packing is the fastest conversion of a list."""
    return np.frombuffer(Struct(f"{len(tokens)}q").pack(*tokens), dtype=np.int64)
