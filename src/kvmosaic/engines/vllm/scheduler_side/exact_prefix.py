"""Exact KV of prompts with chunks, in vLLM's prefix cache."""

from collections.abc import Sequence
from typing import Any

from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, hashes_of_blocks
from kvmosaic.engines.vllm.scheduler_side.admission import Admission
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.shape import EngineShape


class ExactPrefixes:
    """Finds out whether vLLM's prefix cache already has a prompt as plain vLLM computed it. It does if an earlier
    prompt had the same chunks in the same order and was prefilled, for example because they were not stored yet."""

    def __init__(self, shape: EngineShape, admission: Admission, pool: FreeBlocks) -> None:
        self._shape = shape
        self._admission = admission
        self._pool = pool

    def enough(self, request: ChunkRequest, salted: Sequence[Any]) -> int:
        """Number of leading tokens in vLLM's prefix cache that save as much as reuse, to within one block. 0 if the
        cache lacks them, or holds a longer prefix that only reuse finds. ``salted``: the hashes of the prompt's
        blocks for reuse."""
        assert request.block_salts is not None
        plain = request.block_salts.plain
        if request.adapter is not None:  # vLLM may replace its weights under the same name
            return 0
        size = self._shape.block_size
        shared = request.prompt.chunks[0].start // size * size  # with reuse, the prefix cache has these as well
        spared = request.prompt.question.start - self._admission.tokens_to_compute(request, shared)
        blocks = spared // size
        if spared - shared < size or not self._has(plain, blocks - 1):
            return 0
        behind = request.prompt.question.start // size
        if self._has(salted, behind) and not self._has(plain, behind):
            return 0  # of a conversation whose earlier turns were served by reuse
        return (blocks - self._shape.has_drafts) * size  # with some draft models, vLLM finds a block less

    def has_more(self, plain: Sequence[Any], local: int) -> bool:
        """Whether it has a block behind the first ``local`` tokens."""
        return self._has(plain, local // self._shape.block_size)

    def _has(self, plain: Sequence[Any], index: int) -> bool:
        blocks = hashes_of_blocks(list(plain), self._shape.hash_block_size, self._shape.block_size)
        return index < len(blocks) and self._pool.has_cached(blocks[index])
