"""A request with chunks, as the scheduler's side knows it."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.blend import policy_named
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Adapter, ChunkLoad, Images
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt, BlockSalts
from kvmosaic.engines.vllm.scheduler_side.images import PromptImages
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape


@dataclass
class ChunkRequest:
    """A request with chunks, while it waits or runs.

    It asks for blocks (``matched_tokens``) any number of times, gets them (``allocated``), and asks again after a
    preemption. ``reset_after_alloc`` forgets the state of earlier asking."""

    request_id: str
    prompt: ChunkedPrompt
    ratio: float
    policy: str
    context: tuple[int, ...]
    """Tokens that its chunks are computed after."""
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    turn_ends: tuple[int, ...]
    """For each chunk, the position where its turn of the conversation ends."""
    adapter: Adapter | None = None
    """Its adapter, if it has one."""
    images: PromptImages | None = None
    """Its images, if it has any. Their tokens in ``prompt`` are stand-ins."""
    fetched_from: dict[bytes, str] = field(default_factory=dict)
    """Tiers from which chunks were fetched, by content hash."""
    fetched: dict[bytes, int] = field(default_factory=dict)
    """Chunks that ranks were asked to fetch, and their numbers of tokens."""
    block_salts: BlockSalts | None = None
    """The salts of its block hashes, once it has some."""
    plain_because: Fallback | None = None
    """Why it is served plainly, once that is decided. Its blocks are then those of the plain prompt."""
    plain_tokens: int = 0
    """Number of leading tokens that vLLM's prefix cache has to have then. With fewer, it is decided again."""
    plain_local: int = 0
    """Number of leading tokens that vLLM's prefix cache had when it was last asked for."""
    lost: set[bytes] = field(default_factory=set)
    """Stored chunks that a fetch did not bring."""
    predicted: float | None = None
    """Predicted seconds for loading its chunks; ``None`` before a prediction, or without measured costs."""
    is_worth_it: bool = False
    """Whether reuse was predicted to be faster than a plain prefill."""
    load_end: int = field(init=False)
    """Position up to which its load goes: the question's start, or that of the prompt's last token. If vLLM's prefix
    cache has a part of the question, nothing is loaded, and it is the end of that part."""
    needed: tuple[int, int] | None = None
    """Number of tokens in vLLM's prefix cache when room for it was last checked, and the approximate cost of its
    load, in tokens."""
    is_alone: bool = False
    """Whether no other request was running when vLLM last asked about it."""
    may_probe: bool = True
    """Whether its policy may probe the question. If not, the choice needs neither text nor missing chunks, so the
    request can be loaded in slices."""
    is_noted: bool = False
    """Whether its missing chunks were queued to be filled in the background."""
    lacking: list[bytes] | None = None
    """Chunks that it waits for until they are filled in the background, the first one last; ``None`` before this was
    checked."""
    filled: frozenset[bytes] = frozenset()
    """Chunks that were queued to be filled for it in the background before it began."""
    is_long: bool = False
    """Whether it is to be loaded in slices, over several steps."""
    is_in_slices: bool = False
    """Whether it has its blocks and is being loaded in slices. It gets more blocks when all slices are done."""
    is_stale: bool = False
    """Whether weights changed since it arrived, so that vLLM may have KV of the old weights for it."""
    report: dict[str, Any] = field(default_factory=dict)
    """The report on its chunks."""
    _waiting_for: set[int] | None = None
    """Ranks that have yet to fetch its chunks; ``None`` before any was asked to."""
    _since: float | None = None
    """Time when it began to wait for room, or for chunks that are filled, in seconds."""
    _fetching_since: float | None = None
    """Time when it began to wait for slower tiers, or for ranks to list their entries, in seconds."""

    def __post_init__(self) -> None:
        self.load_end = self.prompt.question.start

    @property
    def is_probed(self) -> bool:
        """Whether the choice of recomputed tokens depends on the prompt's KV."""
        return self.may_probe and self._may_be_probed

    @property
    def _may_be_probed(self) -> bool:
        return 0 < self.ratio < 1 and policy_named(self.policy).reads_content

    @property
    def narrows(self) -> bool:
        """Whether its set of recomputed tokens shrinks from layer to layer."""
        return 0 < self.ratio < 1 and policy_named(self.policy).narrows

    @property
    def has_fetched(self) -> bool:
        """Whether ranks were asked to fetch its chunks, or did not need to be."""
        return self._waiting_for is not None

    @property
    def has_arrived(self) -> bool:
        """Whether all ranks have fetched its chunks."""
        return self._waiting_for is not None and not self._waiting_for

    def chunks_from(self, start: int) -> list[tuple[Span, bytes]]:
        """The chunks that end behind position ``start``, with their content hashes."""
        pairs = zip(self.prompt.chunks, self.digests, strict=True)
        return [(span, digest) for span, digest in pairs if span.end > start]

    def finds(self, digest: bytes, mirror: StoreMirror) -> bool:
        """Whether its load finds a chunk: one that is stored, but not in a slow tier that failed to bring it."""
        return mirror.is_near(digest) or (digest not in self.lost and mirror.has(digest))

    @property
    def features(self) -> Sequence[Any]:
        """vLLM's records of its images, and of other inputs than text."""
        return () if self.images is None else self.images.features

    def images_in(self, span: Span) -> Images | None:
        """One of its chunks with its images; ``None`` if it has none."""
        return None if self.images is None else self.images.inside(span)

    def begins_inside(self, local: int) -> bool:
        """Whether vLLM's prefix cache, which has the first ``local`` tokens, ends inside a chunk. Layers with a
        sliding window may then lack KV that the next tokens see, so only a load can continue from there. Blocks of
        the plain prompt have all KV."""
        return self.plain_because is None and any(span.start < local < span.end for span in self.prompt.chunks)

    def first_cut_block(self, shape: EngineShape) -> int | None:
        """The first block of the first chunk that some layers keep only in part; ``None`` without one."""
        cut = (span.start for span in self.prompt.chunks if shape.is_cut(len(span)))
        start = next(cut, None)
        return None if start is None else start // shape.hash_block_size

    def salts(self, shape: EngineShape) -> list[BlockSalt]:
        """Salts for the hashes of its blocks, none overlapping. A block's salt depends on the ratio, the policy, and
        where chunks begin and end before the block's end. Later text does not count, so a conversation finds the
        blocks of its earlier turns; only with a policy that looks at the prompt, the rest of the chunk's turn also
        counts. Chunks share a budget of recomputed tokens, so the tokens that are recomputed in a chunk may still
        depend on later chunks. So blocks with the same hash hold the same tokens, blended with the same ratio and
        policy, but not always the same numbers. At ratio 1 there are no salts, because all KV is what vLLM
        computes."""
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
        """Positions from which on KV differs from that of the plain prompt, and the data that it depends on there."""
        covered = 0  # salts are chained, so all tokens up to here count in those that follow
        for span, digest, end in zip(self.prompt.chunks, self.digests, self.turn_ends, strict=True):
            if self._may_be_probed and end > covered:
                yield span.start, b"turn" + self.prompt.token_array[span.start : end].tobytes()
                covered = end
            # Blocks of a chunk that is cut are valid only for prompts with the whole chunk.
            yield span.start, b"cut" + digest if shape.is_cut(len(span)) else b"chunk"
            yield span.end, b"end"

    def salt_blocks(self, shape: EngineShape) -> None:
        """Set its blocks apart from those of the plain prompt."""
        assert self.block_salts is not None
        self.block_salts.add(self.salts(shape))
        self.plain_because = None  # only now: from here on, its blocks may be loaded

    def load(
        self,
        local: int,
        blocks: tuple[tuple[int, ...], ...],
        spare: tuple[int, ...],
        *,
        fill: bool,
        is_findable: bool,
        is_reported: bool,
    ) -> ChunkLoad:
        """The worker's task for it, in ``blocks``, of which vLLM's prefix cache fills the first ``local`` tokens."""
        return ChunkLoad(
            request_id=self.request_id,
            prompt=self.prompt,
            digests=self.digests,
            ratio=self.ratio,
            policy=self.policy,
            start=local,
            end=self.load_end,
            shared_until=local,
            blocks=blocks,
            spare=spare,
            is_findable=is_findable,
            fill=fill,
            is_sliced=self.is_long,
            is_reported=is_reported,
            may_probe=self.may_probe,
            adapter=self.adapter,
            images=None if self.images is None else self.images.before(self.prompt.question.start),
        )

    def wait_for(self, ranks: int) -> None:
        """Ranks ``0 .. ranks-1`` are asked to fetch its chunks."""
        self._waiting_for = set(range(ranks))
        self._fetching_since = time.monotonic()

    def arrived(self, rank: int, lost: frozenset[bytes], sources: Mapping[bytes, str]) -> None:
        """A rank has fetched its chunks from their ``sources``, except stored ones that are ``lost``."""
        self.fetched_from |= {digest: sources[digest] for digest in self.fetched if digest in sources}
        if self._waiting_for:
            self._waiting_for.discard(rank)
        if lost:
            self.lost |= lost
            self.is_worth_it = False

    def has_patience(self, seconds: float) -> bool:
        """Whether it still waits: it does for ``seconds`` after the first call."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now < self._since + seconds

    def has_patience_with_fetch(self, seconds: float) -> bool:
        """Whether it still waits for slower tiers: it does for ``seconds`` after its latest fetch began, or after the
        first call."""
        now = time.monotonic()
        if self._fetching_since is None:
            self._fetching_since = now
        return now < self._fetching_since + seconds

    def reset_after_alloc(self) -> None:
        """It got its blocks. If it is preempted and resumes, it asks again."""
        self.is_worth_it = self.is_noted = False
        self.needed = None
        self.lacking = self._waiting_for = self._since = self._fetching_since = None
        self.fetched, self.lost = {}, set()
