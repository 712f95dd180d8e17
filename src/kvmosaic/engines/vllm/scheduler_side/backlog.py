"""Chunks that requests lacked, waiting to be filled in the background."""

import time
from typing import NamedTuple

from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step
from kvmosaic.engines.vllm.messages import ChunkFill

STEP_TOKENS = 2048
"""Approximate tokens that one step fills in the background; at least one chunk."""
MAX_WAITING = 4096
"""Maximum chunks in the backlog. The oldest ones beyond it are forgotten: the next request that lacks them brings
them back."""
OVERDUE_SECONDS = 1.0
"""Age from which on a chunk no longer waits for a step that computes no prompts."""


class _Waiting(NamedTuple):
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    since: float


class FillBacklog:
    """Hands out a few chunks with each step that only decodes, so that no first token waits for them; when there is
    no such step for long, with any step."""

    def __init__(self, block_size: int, step_tokens: int = STEP_TOKENS) -> None:
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._waiting: dict[bytes, _Waiting] = {}

    def __len__(self) -> int:
        """Chunks that wait."""
        return len(self._waiting)

    def add(self, digest: bytes, tokens: tuple[int, ...], context: tuple[int, ...]) -> None:
        """Note a missing chunk."""
        if digest not in self._waiting:
            self._waiting[digest] = _Waiting(tokens, context, time.monotonic())
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, step: Step, pool: FreeBlocks) -> list[ChunkFill]:
        """What to fill in ``step``, in blocks of ``pool`` that are free as long as it lasts: their next owner writes
        them in a later step. Oldest first. Chunks of one context come together: the context's full blocks are
        computed and charged once for all of them."""
        if not self._waiting or not self._fits(step):
            return []
        groups: dict[tuple[int, ...], list[bytes]] = {}
        counts: dict[tuple[int, ...], int] = {}
        room, free = self._step_tokens, pool.count
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
        borrowed = {context: pool.borrow(count) for context, count in counts.items()}
        fills = []
        for context, digests in groups.items():
            chunks = tuple((digest, self._waiting.pop(digest).tokens) for digest in digests)
            fills.append(ChunkFill(context=context, chunks=chunks, blocks=(borrowed[context].ids,)))
        for blocks in borrowed.values():
            pool.give_back(blocks)
        return fills

    def _fits(self, step: Step) -> bool:
        if step.total_tokens == 0:
            return False
        oldest = next(iter(self._waiting.values()))
        return step.only_decodes or time.monotonic() - oldest.since > OVERDUE_SECONDS
