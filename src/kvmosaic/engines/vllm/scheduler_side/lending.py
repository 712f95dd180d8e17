"""Blocks that requests borrow for one step."""

from kvmosaic.blend.base import PROBE_TOKENS
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.vllm.compat.scheduling import Borrowed, FreeBlocks
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape


class BlockLender:
    """Lends blocks of vLLM's pool for tokens that have no room in a request's own blocks."""

    def __init__(self, config: ChunkCacheConfig, shape: EngineShape, mirror: StoreMirror, pool: FreeBlocks) -> None:
        self._fills_first = config.miss_policy == "fill-first"
        self._shape = shape
        self._mirror = mirror
        self._pool = pool
        self._lent: list[Borrowed] = []

    def lend(self, request: ChunkRequest, local: int, owned: int) -> tuple[int, ...]:
        """Lend blocks to a request that has ``owned`` blocks, of which vLLM's prefix cache fills the first ``local``
        tokens. They are for the probed part of the question, if the step itself does not compute all of it, and for
        the longest chunk that is filled first, with its context."""
        probed = filled = 0
        if request.is_probed:
            question = request.prompt.question
            probed = self._shape.blocks_for(min(question.end, question.start + PROBE_TOKENS)) - owned
        if self._fills_first:
            lengths = [
                len(request.context) + len(span)
                for span, digest in request.chunks_from(local)
                if not request.finds(digest, self._mirror)
            ]
            longest = max((length for length in lengths if length <= self._shape.max_positions), default=0)
            filled = self._shape.blocks_for(longest) - (owned - local // self._shape.block_size)
        free = self._pool.count
        lacking = max((count for count in (probed, filled) if count <= free), default=0)
        if lacking <= 0:
            return ()
        self._lent.append(self._pool.borrow(lacking))
        return self._lent[-1].ids

    def take_back(self) -> None:
        """Take back all lent blocks once the step is planned: their next owner writes to them in a later step."""
        for borrowed in self._lent:
            self._pool.give_back(borrowed)
        self._lent.clear()
