"""Scheduler side: which requests have chunks, how many tokens of them the worker brings, under which hashes."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmosaic.blend import policy_for_ratio
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkLoad:
    """What the worker has to do for one request before its next forward."""

    request_id: str
    prompt: ChunkedPrompt
    ratio: float
    first: int
    """Tokens that vLLM's own prefix cache already holds."""
    blocks: tuple[tuple[int, ...], ...]
    """The request's block ids, per KV cache group."""


class ChunkScheduler:
    """Plans requests. Holds a plan only while its request waits or runs."""

    def __init__(self, config: ChunkCacheConfig, parser: ChunkTokenParser, block_size: int) -> None:
        self._config = config
        self._parser = parser
        self._block_size = block_size
        self._plans: dict[str, tuple[ChunkedPrompt, float]] = {}
        self._loads: list[ChunkLoad] = []

    def add(self, request: Any) -> None:
        """Parse a new request. From its first block with chunk tokens on, its block hashes are made its own."""
        plan = self._plan(request)
        if plan is None:
            return
        self._plans[request.request_id] = plan
        prompt, ratio = plan
        salt = f"{ratio}|{self._config.model_dump_json()}|{prompt.chunks}".encode()
        salt_block_hashes(request, prompt.chunks[0].start // self._block_size, salt)

    def matched_tokens(self, request: Any, num_local: int) -> int:
        """Tokens after the first ``num_local`` that the worker brings: everything up to the question."""
        plan = self._plans.get(request.request_id)
        return 0 if plan is None else max(0, plan[0].question.start - num_local)

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """The request got its blocks: have it loaded in the coming step."""
        if num_external == 0:
            return
        prompt, ratio = self._plans[request.request_id]
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        first = prompt.question.start - num_external
        self._loads.append(ChunkLoad(request.request_id, prompt, ratio, first, ids))

    def take_loads(self) -> list[ChunkLoad]:
        """The loads of the step being built."""
        loads, self._loads = self._loads, []
        return loads

    def finished(self, request: Any) -> None:
        self._plans.pop(request.request_id, None)

    def _plan(self, request: Any) -> tuple[ChunkedPrompt, float] | None:
        params = request.kv_transfer_params or {}
        if params.get("chunk_cache") is False or not request.prompt_token_ids:
            return None
        if request.lora_request is not None or request.mm_features:
            return None
        try:
            prompt = self._parser.parse(request.prompt_token_ids, params.get("boundaries"))
            ratio = float(params.get("recompute_ratio", self._config.recompute_ratio))
            policy_for_ratio(ratio)
        except KvmosaicError as error:
            logger.warning("request %s is served without the chunk cache: %s", request.request_id, error)
            return None
        return (prompt, ratio) if prompt.chunks else None


def salt_block_hashes(request: Any, first: int, salt: bytes) -> None:
    """Give the request hashes of its own from block ``first`` on, also for blocks that are not full yet.

    Approximate KV must never be found by a request that did not ask for it; the same request asked again
    may find it. Hashes are chained, so changing one changes all behind it."""
    original: Callable[[Any], list[Any]] | None = request._block_hasher
    if original is None:
        return

    def salted(hashed: Any) -> list[Any]:
        known = len(hashed.block_hashes)
        new = original(hashed)
        if not known <= first < known + len(new):
            return new
        mine = new[first - known]
        head = [*new[: first - known], type(mine)(hashlib.sha256(salt + mine).digest()[: len(mine)])]
        hashed.block_hashes.extend(head)
        rest = original(hashed)
        del hashed.block_hashes[known:]
        return [*head, *rest]

    request._block_hasher = salted
    del request.block_hashes[first:]
    request.update_block_hashes()
