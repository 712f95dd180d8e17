"""Chunks that requests lacked, waiting to be filled in the background."""

import time
from typing import Any, NamedTuple

from kvmosaic.engines.vllm.messages import ChunkFill

MOST_WAITING = 4096
"""Chunks beyond this many are forgotten, oldest first: whoever asks for them again brings them back."""
OVERDUE_SECONDS = 1.0
"""After so long a chunk no longer waits for a step that computes no prompts."""


class _Waiting(NamedTuple):
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    since: float


class FillBacklog:
    """Hands out a few chunks with each step that only decodes, so that nobody's first token waits for them; when
    there is no such step for long, with any step."""

    def __init__(self, step_tokens: int, block_size: int) -> None:
        self._step_tokens = step_tokens
        self._block_size = block_size
        self._waiting: dict[bytes, _Waiting] = {}

    def add(self, digest: bytes, tokens: tuple[int, ...], context: tuple[int, ...]) -> None:
        """Note a missing chunk."""
        if digest not in self._waiting:
            self._waiting[digest] = _Waiting(tokens, context, time.monotonic())
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, step: Any, pool: Any) -> list[ChunkFill]:
        """What to fill in ``step``, a ``SchedulerOutput``, in blocks of ``pool`` that are free as long as it lasts:
        whoever gets them next writes them in a later step. Oldest first; chunks of one context come together, and as
        far as it fills blocks it is computed, and charged, once for all of them."""
        if not self._waiting or not self._fits(step):
            return []
        groups: dict[tuple[int, ...], list[bytes]] = {}
        counts: dict[tuple[int, ...], int] = {}
        room, free = self._step_tokens, pool.get_num_free_blocks()
        for digest, chunk in self._waiting.items():
            shared = len(chunk.context) // self._block_size * self._block_size
            computed = len(chunk.context) - shared + len(chunk.tokens)
            computed += shared if chunk.context not in groups else 0
            count = -(-computed // self._block_size)
            if (groups and computed > room) or count > free:
                break
            groups.setdefault(chunk.context, []).append(digest)
            counts[chunk.context] = counts.get(chunk.context, 0) + count
            room, free = room - computed, free - count
        borrowed = {context: pool.get_new_blocks(count) for context, count in counts.items()}
        fills = []
        for context, digests in groups.items():
            chunks = tuple((digest, self._waiting.pop(digest).tokens) for digest in digests)
            fills.append(ChunkFill(context, chunks, (tuple(block.block_id for block in borrowed[context]),)))
        pool.free_blocks([block for blocks in borrowed.values() for block in blocks])
        return fills

    def _fits(self, step: Any) -> bool:
        if step.total_num_scheduled_tokens == 0:
            return False
        decodes_only = step.total_num_scheduled_tokens <= len(step.num_scheduled_tokens)
        oldest = next(iter(self._waiting.values()))
        return decodes_only or time.monotonic() - oldest.since > OVERDUE_SECONDS
