"""A request with chunks, as the scheduler's side knows it."""

import time
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.blend import policy_named
from kvmosaic.core.prompt import ChunkedPrompt, Span


@dataclass
class ChunkRequest:
    """A request with chunks, while it waits or runs.

    It asks for blocks (``matched_tokens``) any number of times, gets them (``allocated``), and after a preemption
    asks again. Everything below ``digests`` is of the current asking, except ``fetched_from`` and ``report``."""

    request_id: str
    prompt: ChunkedPrompt
    ratio: float
    policy: str
    context: tuple[int, ...]
    """What its chunks are computed after."""
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    fetched_from: dict[bytes, str] = field(default_factory=dict)
    """Chunks that came from slower tiers."""
    asked_for: list[bytes] = field(default_factory=list)
    """Chunks that no rank knows and the remote tier was asked for."""
    predicted: float | None = None
    """Seconds that bringing its chunks will take, where that was asked and costs were measured."""
    is_worth_it: bool = False
    """Whether reuse was found to be faster than a plain prefill."""
    at_once: int | None = None
    """Tokens to compute in the step in which it gets its blocks, if it is to be loaded in slices."""
    is_in_slices: bool = False
    """Whether it got its blocks so, and will get some more when all slices are done."""
    report: dict[str, Any] = field(default_factory=dict)
    """What happened to its chunks."""
    _waiting_for: set[int] | None = None
    """Ranks that have yet to fetch its chunks; ``None`` before any was asked to."""
    _deadline: float | None = None

    @property
    def is_probed(self) -> bool:
        """Whether choosing what is recomputed takes a look at the prompt's KV."""
        return 0 < self.ratio < 1 and policy_named(self.policy).reads_content

    @property
    def has_fetched(self) -> bool:
        """Whether ranks were asked to fetch its chunks, or none had to be."""
        return self._waiting_for is not None

    @property
    def has_arrived(self) -> bool:
        """Whether all ranks have fetched its chunks."""
        return self._waiting_for is not None and not self._waiting_for

    def chunks_from(self, start: int) -> list[tuple[Span, bytes]]:
        """The chunks that end behind position ``start``, with their content hashes."""
        pairs = zip(self.prompt.chunks, self.digests, strict=True)
        return [(span, digest) for span, digest in pairs if span.end > start]

    def is_begun(self, local: int) -> bool:
        """Whether vLLM's prefix cache, which has the first ``local`` tokens, has some of chunks. Reuse may have left
        them, and then the others have to become what they were: a prefill of the rest would give an answer that is
        neither of the two."""
        return local > self.prompt.chunks[0].start

    def salt(self) -> bytes:
        """Everything that the KV of chunks depends on besides the tokens up to there."""
        text = repr((self.ratio, self.prompt.chunks))
        if 0 < self.ratio < 1:
            text += repr(self.policy)
        # What is recomputed depends on the policy and, with most, on all of the prompt.
        return text.encode() + (self.prompt.token_array.tobytes() if self.is_probed else b"")

    def wait_for(self, ranks: int) -> None:
        """Ranks ``0 .. ranks-1`` are asked to fetch its chunks."""
        self._waiting_for = set(range(ranks))

    def arrived(self, rank: int) -> None:
        """A rank has brought what it waits for, or could not."""
        if self._waiting_for:
            self._waiting_for.discard(rank)

    def has_patience(self, seconds: float) -> bool:
        """Whether it still waits; it does for ``seconds`` from the first time on that this is asked."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + seconds
        return now < self._deadline

    def reset_after_alloc(self) -> None:
        """It got its blocks. If it is preempted and comes back, it asks again."""
        self.is_worth_it = False
        self._waiting_for = self._deadline = None
