"""A request with chunks, as the scheduler's side knows it."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.blend import policy_named
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt
from kvmosaic.engines.vllm.shape import EngineShape


@dataclass
class ChunkRequest:
    """A request with chunks, while it waits or runs.

    It asks for blocks (``matched_tokens``) any number of times, gets them (``allocated``), and after a preemption
    asks again; ``reset_after_alloc`` forgets what was of the asking before."""

    request_id: str
    prompt: ChunkedPrompt
    ratio: float
    policy: str
    context: tuple[int, ...]
    """What its chunks are computed after."""
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    turn_ends: tuple[int, ...]
    """For each chunk, the position where its turn of the conversation ends."""
    fetched_from: dict[bytes, str] = field(default_factory=dict)
    """Chunks that came from slower tiers."""
    asked_for: list[bytes] = field(default_factory=list)
    """Chunks that no rank knows and the remote tier was asked for."""
    predicted: float | None = None
    """Seconds that bringing its chunks will take, where that was asked and costs were measured."""
    is_worth_it: bool = False
    """Whether reuse was found to be faster than a plain prefill."""
    needed: tuple[int, int] | None = None
    """Tokens that vLLM's prefix cache had when room for it was looked for last, and approximate tokens to compute."""
    is_noted: bool = False
    """Whether its missing chunks were noted, to be filled in the background."""
    lacking: list[bytes] | None = None
    """Chunks that it waits for the background to fill; ``None`` before anybody looked."""
    filled: frozenset[bytes] = frozenset()
    """Chunks that the background was asked to fill for it, before it began."""
    is_long: bool = False
    """Whether it is to be loaded in slices, over several steps."""
    is_in_slices: bool = False
    """Whether it got its blocks for that; it gets some more when all slices are done."""
    is_stale: bool = False
    """Whether weights changed since it came: KV that vLLM has of it may be that of the old ones."""
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

    def begins_inside(self, local: int) -> bool:
        """Whether vLLM's prefix cache, which has the first ``local`` tokens, ends inside a chunk. Layers with a
        sliding window may then lack what the next tokens see, so only a load can go on from there."""
        return any(span.start < local < span.end for span in self.prompt.chunks)

    def salts(self, shape: EngineShape) -> list[BlockSalt]:
        """What is mixed into the hashes of its blocks, none overlapping: ratio, policy, and where chunks begin and
        end up to a block's end. Nothing that comes later counts, so a conversation finds the blocks of its earlier
        turns; only with a policy that looks at the prompt the rest of the chunk's turn does. Which tokens of a chunk
        are recomputed may still depend on later chunks, with which it shares a budget: blocks of one hash hold the
        same tokens, blended with the same ratio by the same policy, not always the same numbers. At ratio 1 all KV
        is what vLLM computes."""
        if self.ratio == 1:
            return []
        salts: list[BlockSalt] = []
        # A chain, not a sum: a client that chooses boundaries could make the terms of a sum cancel out.
        state = hashlib.sha256(repr((self.ratio, self.policy if self.ratio else None)).encode()).digest()
        for position, what in self._salted_by(shape):
            state = hashlib.sha256(state + repr(position).encode() + what).digest()
            block = position // shape.hash_block_size
            if salts and salts[-1].first == block:
                salts.pop()
            elif salts:
                salts[-1] = salts[-1]._replace(end=block)
            salts.append(BlockSalt(state, block, None))
        return salts

    def _salted_by(self, shape: EngineShape) -> Iterator[tuple[int, bytes]]:
        """Positions from which on KV is another than that of the plain prompt, and what it depends on there."""
        turn_end = None
        for span, digest, end in zip(self.prompt.chunks, self.digests, self.turn_ends, strict=True):
            if self.is_probed and end != turn_end:
                yield span.start, b"turn" + self.prompt.token_array[span.start : end].tobytes()
            turn_end = end
            # Of a chunk that is cut, blocks are good for prompts alone that have all of it.
            yield span.start, b"cut" + digest if shape.is_cut(len(span)) else b"chunk"
            yield span.end, b"end"

    def load(
        self,
        local: int,
        blocks: tuple[tuple[int, ...], ...],
        spare: tuple[int, ...],
        *,
        fill: bool,
        is_findable: bool,
    ) -> ChunkLoad:
        """What the worker has to do for it, now that it has ``blocks``, of which vLLM's prefix cache fills the first
        ``local`` tokens."""
        return ChunkLoad(
            request_id=self.request_id,
            prompt=self.prompt,
            digests=self.digests,
            ratio=self.ratio,
            policy=self.policy,
            start=local,
            shared_until=local,
            blocks=blocks,
            spare=spare,
            is_findable=is_findable,
            fill=fill,
            is_sliced=self.is_long,
        )

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
        self.is_worth_it = self.is_noted = False
        self.needed = None
        self.lacking = self._waiting_for = self._deadline = None
