"""Missing chunks of requests, which wait to be filled in the background."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvmosaic.engines.vllm.compat.scheduling import Borrowed, FreeBlocks, Step
from kvmosaic.engines.vllm.messages import Adapter, ChunkFill, FillSlice
from kvmosaic.engines.vllm.scheduler_side.askers import Askers
from kvmosaic.engines.vllm.scheduler_side.fair_queue import FairQueue, WaitingChunk
from kvmosaic.engines.vllm.scheduler_side.idle_fills import IdleFills
from kvmosaic.engines.vllm.shape import EngineShape

OVERDUE_SECONDS = 1.0
"""Age, in seconds, from which on a chunk that is wanted no longer waits for a quiet step."""
ONCE_SECONDS = 60.0
"""Age, in seconds, at which a chunk that is not wanted is dropped, so that it does not take the place of others."""
MAX_LOOKS = 32
"""Maximum number of chunks that a step passes over, for example for lack of free blocks."""


class _Group(NamedTuple):
    """Context and adapter of chunks that are filled together."""

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
    """Hands out a few chunks with each quiet step, so that no first token waits for them. A step is quiet if neither
    it nor the step before computes a prompt: vLLM may plan a step while the last one still computes a first token. If
    there is no quiet step for some time, chunks that are wanted are handed out with any step; other chunks may never
    be asked for again. A chunk is wanted if a request waits for it, or if several requests asked for it. A chunk that
    is too long for one step is filled in slices, one such chunk at a time. Chunks of an adapter wait until a step has
    requests with it."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._asked_once = FairQueue()
        """Chunks that the current step can fill, and that one request asked for."""
        self._wanted = FairQueue()
        """Chunks that the current step can fill, and that are wanted."""
        self._idle = IdleFills()
        self._askers = Askers()
        self._active: frozenset[Adapter] = frozenset()
        """Adapters of the current step's requests."""
        self._begun: _Begun | None = None
        self._handed_out: set[bytes] = set()
        """Chunks that the workers fill, as far as is known."""
        self._passed_over: set[bytes] = set()
        """Chunks for which the current step has too few free blocks. Each counts as one try per step."""
        self._was_quiet = True
        """Whether the latest step computed no prompt."""

    def __len__(self) -> int:
        """Number of chunks that wait or are begun."""
        return len(self._asked_once) + len(self._wanted) + len(self._idle) + (self._begun is not None)

    def _get(self, digest: bytes, adapter: Adapter | None) -> WaitingChunk | None:
        """The chunk, if it waits or is begun."""
        if self._begun is not None and self._begun.chunk.digest == digest:
            return self._begun.chunk
        idle = None if adapter is None else self._idle.get(adapter, digest)
        return self._wanted.get(digest) or self._asked_once.get(digest) or idle

    def is_coming(self, digest: bytes) -> bool:
        """Whether a chunk without an adapter waits, is begun, or is being filled by the workers."""
        return digest in self._handed_out or self._get(digest, None) is not None

    def ended(self, digests: Iterable[bytes]) -> None:
        """The workers have filled these chunks, or failed to."""
        self._handed_out.difference_update(digests)

    def add(self, chunks: Iterable[WaitingChunk], *, is_awaited: bool = False) -> None:
        """Queue missing chunks. ``is_awaited``: their request waits for them; it has no adapter."""
        queued, idle = list[WaitingChunk](), list[WaitingChunk]()
        for chunk in {chunk.digest: chunk for chunk in chunks}.values():
            is_wanted = self._askers.has_other(chunk) or is_awaited
            earlier = self._get(chunk.digest, chunk.adapter)
            if earlier is None:
                can_be_filled = chunk.adapter is None or chunk.adapter in self._active
                (queued if can_be_filled else idle).append(replace(chunk, is_wanted=is_wanted))
            elif is_wanted:
                self._want(earlier, chunk.since)
        self._queue(queued)
        self._idle.add(idle)

    def _want(self, chunk: WaitingChunk, since: float) -> None:
        """A chunk that waits or is begun is wanted, from now on."""
        if chunk.is_wanted:
            return
        is_queued = self._asked_once.get(chunk.digest) is chunk
        if is_queued:
            self._asked_once.remove(chunk)
        chunk.is_wanted, chunk.since = True, since
        if is_queued:
            self._queue([chunk])

    def _queue(self, chunks: Sequence[WaitingChunk]) -> None:
        self._wanted.add(chunk for chunk in chunks if chunk.is_wanted)
        self._asked_once.add(chunk for chunk in chunks if not chunk.is_wanted)

    def clear(self, pool: FreeBlocks) -> None:
        """Forget all chunks."""
        self.let_go(pool)
        self._asked_once.clear()
        self._wanted.clear()
        self._idle.clear()
        self._askers.clear()
        self._handed_out.clear()

    def let_go(self, pool: FreeBlocks) -> None:
        """Give back the blocks of a chunk that is begun. It waits again, and will be filled from its start."""
        if self._begun is not None:
            pool.give_back(self._begun.blocks)
            chunk, self._begun = self._begun.chunk, None
            (self._wanted if chunk.is_wanted else self._asked_once).put_back(chunk)

    def use_adapters(self, active: frozenset[Adapter], pool: FreeBlocks) -> int:
        """Adapters that the coming step has requests with: chunks of these can be filled, others wait. Returns the
        number of chunks that were dropped: they waited for too long and are not wanted, or their adapter was idle for
        too long."""
        if self._begun is not None and self._begun.chunk.adapter not in (None, *active):
            self.let_go(pool)
        if inactive := self._active - active:
            for queue in (self._asked_once, self._wanted):
                self._idle.add(queue.take_all_of(inactive))
        self._queue(self._idle.wake(active))
        self._active = active
        return self._idle.drop() + self._asked_once.drop_before(time.monotonic() - ONCE_SECONDS)

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
        is_idle = step.total_tokens == 0 and not others_run
        if self._begun is not None and ((is_idle and not self._begun.chunk.is_wanted) or pool.count < reserve):
            self.let_go(pool)  # vLLM may need them for what it computes next
        queues = self._due(step, is_full, is_idle) if room > 0 else []
        if not queues:
            return [], None
        self._passed_over.clear()
        if self._begun is not None and not self._begun.chunk.is_wanted and self._asked_once not in queues:
            self.let_go(pool)  # the step is for chunks that are wanted, of which one may have to be begun
        if self._begun is None:
            for queue in queues:
                if self._begin(queue, pool, room, reserve):
                    break
        begun = self._begun
        slice_ = self._slice(begun, room, is_alone=not any(queues)) if begun is not None else None
        fills = self._fill(queues, pool, room, reserve, len(slice_.tokens) if slice_ else 0, pass_tokens)
        if begun is not None and slice_ is not None and slice_.is_last:
            pool.give_back(begun.blocks)
            self._begun = None
            self._hand_out(begun.chunk)
        return fills, slice_

    def _hand_out(self, chunk: WaitingChunk) -> None:
        """The workers get a chunk, or its last slice."""
        self._askers.forget(chunk.digest)
        self._handed_out.add(chunk.digest)

    def _due(self, step: Step, is_full: bool, is_idle: bool) -> list[FairQueue]:
        """The queues that a step may fill chunks of; none if it fills nothing. While vLLM computes nothing, the
        requests that it has may be waiting for these very chunks."""
        is_quiet, was_quiet = step.only_decodes and not is_full, self._was_quiet
        if step.total_tokens == 0 and not is_idle:
            return []
        self._was_quiet = is_quiet
        if is_quiet and was_quiet:
            queues = [self._wanted] if is_idle else [self._wanted, self._asked_once]
        elif self._is_overdue and not is_idle:
            queues = [self._wanted]
        else:
            return []
        return queues if any(queues) or self._begun is not None else []

    @property
    def _is_overdue(self) -> bool:
        """Whether a chunk that is wanted has waited for too long."""
        since = [self._wanted.oldest] if self._wanted else []
        if self._begun is not None and self._begun.chunk.is_wanted:
            since.append(self._begun.chunk.since)
        return bool(since) and time.monotonic() - min(since) > OVERDUE_SECONDS

    def _begin(self, queue: FairQueue, pool: FreeBlocks, room: int, reserve: int) -> bool:
        """Begin to fill the chunk whose turn it is, if it is too long for a step. Returns whether the step fills a
        chunk of the queue, in this way or as a whole."""
        for _ in range(min(MAX_LOOKS, len(queue))):
            chunk = queue.next()
            if chunk.length <= room:
                return True
            count = self._shape.blocks_for(chunk.length)
            if count + reserve <= pool.count:
                done = len(chunk.context) if self._shape.places_sink else 0
                tokens = chunk.context + chunk.tokens
                self._begun = _Begun(queue.take(), tokens, pool.borrow(count), done)
                return True
            self._pass_over(queue, chunk)
        return False

    def _pass_over(self, queue: FairQueue, chunk: WaitingChunk) -> None:
        """Skip the chunk whose turn it is, because there are too few free blocks for it."""
        if chunk.digest in self._passed_over:
            queue.skip()
        else:
            self._passed_over.add(chunk.digest)
            queue.pass_over(is_try=self._begun is None)

    def _slice(self, begun: _Begun, room: int, *, is_alone: bool) -> FillSlice:
        """The next tokens of a chunk: as many as there is room for, or half of that if it is not alone."""
        room = max(1, room if is_alone else room // 2)
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
            images=begun.chunk.images,
            following=None if begun.done == len(begun.tokens) else begun.tokens[begun.done],
        )

    def _fill(
        self, queues: Sequence[FairQueue], pool: FreeBlocks, room: int, reserve: int, used: int, pass_tokens: int
    ) -> list[ChunkFill]:
        """Chunks to fill as a whole, in turns of their requests. A slice has already taken ``used`` tokens of the
        step's ``room``."""
        groups: dict[_Group, list[WaitingChunk]] = {}
        counts: dict[_Group, int] = {}
        left, free = room - used, pool.count
        looks = {id(queue): min(MAX_LOOKS, len(queue)) for queue in queues}
        while queue := next((queue for queue in queues if queue and looks[id(queue)]), None):
            chunk = queue.next()
            group = _Group(chunk.context, chunk.adapter)
            once, each = self._shape.fill_shares(len(chunk.context))
            held = each + len(chunk.tokens) + (0 if group in groups else once)
            computed = len(chunk.tokens) if self._shape.places_sink else held
            if group not in groups and (groups or used):
                computed += pass_tokens
            count = self._shape.blocks_for(held)
            if computed <= left and count <= free:
                groups.setdefault(group, []).append(queue.take())
                self._hand_out(chunk)
                counts[group] = counts.get(group, 0) + count
                left, free = left - computed, free - count
                continue
            if computed > left and self._begun is None:
                if chunk.length <= room or self._shape.blocks_for(chunk.length) + reserve <= pool.count:
                    break  # it keeps its turn for the next step, which has room for it or begins it
                self._pass_over(queue, chunk)
            elif count > free:
                self._pass_over(queue, chunk)
            else:
                queue.skip()
            looks[id(queue)] -= 1
        borrowed = {group: pool.borrow(count) for group, count in counts.items()}
        for blocks in borrowed.values():
            pool.give_back(blocks)
        return [
            ChunkFill(
                context=group.context,
                chunks=tuple((chunk.digest, chunk.tokens) for chunk in chunks),
                blocks=(borrowed[group].ids,),
                adapter=group.adapter,
                images=tuple(chunk.images for chunk in chunks) if any(chunk.images for chunk in chunks) else (),
            )
            for group, chunks in groups.items()
        ]
