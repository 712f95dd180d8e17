"""Missing chunks of requests, which wait to be filled in the background."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvmosaic.engines.vllm.compat.scheduling import Borrowed, FreeBlocks, Step
from kvmosaic.engines.vllm.messages import Adapter, ChunkFill, FillSlice
from kvmosaic.engines.vllm.scheduler_side.fair_queue import FairQueue, WaitingChunk
from kvmosaic.engines.vllm.scheduler_side.idle_fills import IdleFills
from kvmosaic.engines.vllm.shape import EngineShape

OVERDUE_SECONDS = 1.0
"""Age, in seconds, from which on a chunk no longer waits for a step that computes no prompts."""
MAX_LOOKS = 32
"""Maximum number of chunks that a step passes over, for example for lack of free blocks."""


class _Group(NamedTuple):
    """What chunks that are filled together have in common."""

    context: tuple[int, ...]
    adapter: Adapter | None


@dataclass
class _Begun:
    """A chunk that takes several steps to fill."""

    chunk: WaitingChunk
    tokens: tuple[int, ...]
    """Tokens of its context, followed by its own."""
    blocks: Borrowed
    """Blocks that it holds until it is done, or until vLLM may need them."""
    done: int = 0
    """Number of tokens that are computed or placed."""


class FillBacklog:
    """Hands out a few chunks with each step that only decodes, so that no first token waits for them. If there is no
    such step for some time, it hands them out with any step. A chunk that is too long for one step is filled in
    slices, one such chunk at a time. Chunks of an adapter wait until a step has requests with it."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._waiting_chunks = FairQueue()
        """Chunks that the current step can fill."""
        self._idle = IdleFills()
        self._active: frozenset[Adapter] = frozenset()
        """Adapters of the current step's requests."""
        self._begun: _Begun | None = None
        self._passed_over: set[bytes] = set()
        """Chunks for which the current step has too few free blocks. Each counts as one try per step."""

    def __len__(self) -> int:
        """Number of chunks that wait or are begun."""
        return len(self._waiting_chunks) + len(self._idle) + (self._begun is not None)

    def __contains__(self, digest: bytes) -> bool:
        is_begun = self._begun is not None and self._begun.chunk.digest == digest
        return is_begun or digest in self._waiting_chunks or digest in self._idle

    def add(self, chunks: Iterable[WaitingChunk]) -> None:
        """Queue missing chunks."""
        new = [chunk for chunk in chunks if chunk.digest not in self]
        self._waiting_chunks.add(chunk for chunk in new if chunk.adapter is None or chunk.adapter in self._active)
        self._idle.add(chunk for chunk in new if chunk.adapter is not None and chunk.adapter not in self._active)

    def clear(self, pool: FreeBlocks) -> None:
        """Forget all chunks."""
        self.let_go(pool)
        self._waiting_chunks.clear()
        self._idle.clear()

    def let_go(self, pool: FreeBlocks) -> None:
        """Give back the blocks of a chunk that is begun. It waits again, and will be filled from its start."""
        if self._begun is not None:
            pool.give_back(self._begun.blocks)
            self._waiting_chunks.put_back(self._begun.chunk)
            self._begun = None

    def use_adapters(self, active: frozenset[Adapter], pool: FreeBlocks) -> int:
        """Adapters that the coming step has requests with: chunks of these can be filled, others wait. Returns the
        number of chunks that were dropped because their adapter was idle for too long."""
        if self._begun is not None and self._begun.chunk.adapter not in (None, *active):
            self.let_go(pool)
        for adapter in sorted(self._active - active):
            self._idle.add(self._waiting_chunks.take_all_of(adapter))
        self._waiting_chunks.add(self._idle.wake(active))
        self._active = active
        return self._idle.drop()

    def take(
        self,
        step: Step,
        pool: FreeBlocks,
        room: int,
        *,
        pass_tokens: int = 0,
        is_full: bool = False,
        others_run: bool = False,
    ) -> tuple[list[ChunkFill], FillSlice | None]:
        """The chunks to fill in ``step`` by computing about ``room`` tokens. They are filled in free blocks of
        ``pool``, whose next owner writes to them in a later step. ``is_full``: the step already computes much for
        chunks; ``others_run``: earlier steps are still being computed, so that this one may be empty. Chunks with the
        same context and adapter are filled together: the context's full blocks are computed and charged once for all
        of them. Each further context or adapter, and chunks beside a slice, take one more pass of the model, which
        costs ``pass_tokens``."""
        reserve = self._shape.blocks_for(self._shape.step_tokens) + len(step.scheduled)
        if self._begun is not None and ((step.total_tokens == 0 and not others_run) or pool.count < reserve):
            self.let_go(pool)  # vLLM may need them for what it computes next
        if room <= 0 or not self._has_time(step, is_full):
            return [], None
        self._passed_over.clear()
        if self._begun is None and self._waiting_chunks:
            self._begin(pool, room, reserve)
        begun = self._begun
        slice_ = self._slice(begun, room) if begun is not None else None
        fills = self._fill(pool, room, reserve, len(slice_.tokens) if slice_ else 0, pass_tokens)
        if begun is not None and slice_ is not None and slice_.is_last:
            pool.give_back(begun.blocks)
            self._begun = None
        return fills, slice_

    def _has_time(self, step: Step, is_full: bool) -> bool:
        if step.total_tokens == 0 or (not self._waiting_chunks and self._begun is None):
            return False
        if step.only_decodes and not is_full:
            return True
        since = [self._begun.chunk.since] if self._begun is not None else []
        since += [self._waiting_chunks.oldest] if self._waiting_chunks else []
        return time.monotonic() - min(since) > OVERDUE_SECONDS

    def _begin(self, pool: FreeBlocks, room: int, reserve: int) -> None:
        """Begin to fill the chunk whose turn it is, if it is too long for a step."""
        for _ in range(min(MAX_LOOKS, len(self._waiting_chunks))):
            chunk = self._waiting_chunks.next()
            if chunk.length <= room:
                return
            count = self._shape.blocks_for(chunk.length)
            if count + reserve <= pool.count:
                done = len(chunk.context) if self._shape.places_sink else 0
                tokens = chunk.context + chunk.tokens
                self._begun = _Begun(self._waiting_chunks.take(), tokens, pool.borrow(count), done)
                return
            self._pass_over(chunk)

    def _pass_over(self, chunk: WaitingChunk) -> None:
        """Skip the chunk whose turn it is, because there are too few free blocks for it."""
        if chunk.digest in self._passed_over:
            self._waiting_chunks.skip()
        else:
            self._passed_over.add(chunk.digest)
            self._waiting_chunks.pass_over()

    def _slice(self, begun: _Begun, room: int) -> FillSlice:
        """The next tokens of a chunk: as many as there is room for, or half of that while others wait."""
        room = max(1, room // 2 if self._waiting_chunks else room)
        start, tokens = begun.done, begun.tokens[begun.done : begun.done + room]
        begun.done += len(tokens)
        return FillSlice(
            digest=begun.chunk.digest,
            context_tokens=len(begun.chunk.context),
            start=start,
            tokens=tokens,
            blocks=(begun.blocks.ids,),
            is_last=begun.done == len(begun.tokens),
            adapter=begun.chunk.adapter,
        )

    def _fill(self, pool: FreeBlocks, room: int, reserve: int, used: int, pass_tokens: int) -> list[ChunkFill]:
        """Chunks to fill as a whole, in turns of their requests. A slice has already taken ``used`` tokens of the
        step's ``room``."""
        groups: dict[_Group, list[WaitingChunk]] = {}
        counts: dict[_Group, int] = {}
        left, free, looks = room - used, pool.count, min(MAX_LOOKS, len(self._waiting_chunks))
        while self._waiting_chunks and looks:
            chunk = self._waiting_chunks.next()
            group = _Group(chunk.context, chunk.adapter)
            once, each = self._shape.fill_shares(len(chunk.context))
            held = each + len(chunk.tokens) + (0 if group in groups else once)
            computed = len(chunk.tokens) if self._shape.places_sink else held
            if group not in groups and (groups or used):
                computed += pass_tokens
            count = self._shape.blocks_for(held)
            if computed <= left and count <= free:
                groups.setdefault(group, []).append(self._waiting_chunks.take())
                counts[group] = counts.get(group, 0) + count
                left, free = left - computed, free - count
                continue
            if computed > left and self._begun is None:
                if chunk.length <= room or self._shape.blocks_for(chunk.length) + reserve <= pool.count:
                    break  # it keeps its turn for the next step, which has room for it or begins it
                self._pass_over(chunk)
            elif count > free:
                self._pass_over(chunk)
            else:
                self._waiting_chunks.skip()
            looks -= 1
        borrowed = {group: pool.borrow(count) for group, count in counts.items()}
        for blocks in borrowed.values():
            pool.give_back(blocks)
        return [
            ChunkFill(
                context=group.context,
                chunks=tuple((chunk.digest, chunk.tokens) for chunk in chunks),
                blocks=(borrowed[group].ids,),
                adapter=group.adapter,
            )
            for group, chunks in groups.items()
        ]
