"""The images of a request: which of its text can be reused beside them, and what they are called."""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.stand_ins import MIN_TOKENS, stand_ins
from kvmosaic.engines.vllm.compat.images import (
    claimed_name,
    content_hash,
    embedded_tokens,
    is_image,
    place_of,
)
from kvmosaic.engines.vllm.messages import Images


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images, and inputs of other kinds, in a prompt."""

    token_ids: tuple[int, ...]
    """Token ids, with placeholders."""
    features: tuple[Any, ...]
    """vLLM's ``MultiModalFeatureSpec`` of each, ascending."""
    stand_ins: tuple[int, ...]
    """The tokens, with stand-ins for those that have embeddings of their own. Equal stand-ins: equal content."""
    limit: int
    """Position of the first input that a worker cannot read: all text up to here can be reused."""

    @classmethod
    def of(cls, request: Any, *, can_read: bool) -> "PromptImages | None":
        """The inputs of a request; ``None`` if all of it is text. ``can_read``: whether workers can read images."""
        if not request.mm_features:
            return None
        features = sorted(request.mm_features, key=lambda feature: place_of(feature)[0])
        tokens = list(request.prompt_token_ids)
        limit, first, end = len(tokens), 0, 0
        for feature in features:
            start, stop = place_of(feature)
            first = first if start < end else start  # of inputs that overlap
            content, embedded = content_hash(feature) if can_read else None, embedded_tokens(feature)
            # A client may choose the name, so it is not enough.
            name = hashlib.sha256(claimed_name(feature) + b"\0" + (content or b"")).digest()
            numbers = iter(stand_ins(name, int(embedded.sum())))
            tokens[start:stop] = [
                next(numbers) if is_embedded else token
                for token, is_embedded in zip(tokens[start:stop], embedded.tolist(), strict=True)
            ]
            is_known = content is not None and is_image(feature) and embedded.sum() >= MIN_TOKENS
            if not is_known or start < end:
                limit = min(limit, first)
            end = max(end, stop)
        return cls(tuple(request.prompt_token_ids), tuple(features), tuple(tokens), limit)

    @cached_property
    def spans(self) -> list[Span]:
        """The images that workers can read: those before :attr:`limit`, ascending and not overlapping."""
        return [Span(*place_of(feature)) for feature in self.features if place_of(feature)[1] <= self.limit]

    def reusable(self, chunks: Iterable[Span]) -> list[Span]:
        """The chunks before :attr:`limit` that cut no image."""
        return [span for span in chunks if span.end <= self.limit and not self._is_cut(span)]

    def mark(self, prompt: ChunkedPrompt) -> ChunkedPrompt:
        """The prompt with stand-ins, and with chunks that can be reused."""
        return ChunkedPrompt(self.stand_ins, tuple(self.reusable(prompt.chunks)))

    def add_to(self, prompt: ChunkedPrompt, min_tokens: int, most: int) -> ChunkedPrompt:
        """The prompt with images of at least ``min_tokens`` as further chunks, where no chunk has them already. It
        has at most ``most`` chunks then."""
        ends = [span.end for span in prompt.chunks]
        alone = []
        for span in self.spans:
            behind = bisect_right(ends, span.start)
            is_free = behind == len(ends) or prompt.chunks[behind].start >= span.end
            if is_free and len(span) >= min_tokens and span.end < len(self.token_ids):
                alone.append(span)
        alone = alone[: max(0, most - len(ends))]
        return ChunkedPrompt(prompt.token_ids, tuple(sorted([*prompt.chunks, *alone], key=lambda span: span.start)))

    def inside(self, span: Span) -> Images | None:
        """A chunk with its images; ``None`` if it has none."""
        return self._readable.inside(span)

    def before(self, end: int) -> Images | None:
        """The whole prompt with its images before ``end``, none of which ``end`` cuts; ``None`` if there are none."""
        inner = self._readable.between(0, end)
        return Images(self.token_ids, self.features[: inner.stop]) if inner else None

    @cached_property
    def _readable(self) -> Images:
        """The inputs before :attr:`limit`: only these are certain not to overlap."""
        return Images(self.token_ids, self.features[: len(self.spans)])

    def _is_cut(self, span: Span) -> bool:
        """Whether a chunk before :attr:`limit` begins or ends inside an image."""
        for edge in (span.start, span.end):
            index = bisect_left(self.spans, edge, key=lambda image: image.start) - 1
            if index >= 0 and self.spans[index].end > edge:
                return True
        return False
