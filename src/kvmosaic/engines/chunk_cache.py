"""The chunk cache of an engine: keys, lookups, storing."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import EXACT, ChunkKey, ContentHasher, format_fingerprint, marked
from kvmosaic.core.learned_sink import LearnedSink
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.core.store_key import StoreKey
from kvmosaic.engines.identity import chunk_context
from kvmosaic.store import ChunkStorageManager, open_store

ANY_LENGTH = 0
"""Prompt length for engines whose rotary tables do not depend on it."""
FINGERPRINTS_REMEMBERED = 64
Fingerprint = Callable[[int], str | None]
"""Identifies what the KV of chunks depends on besides their tokens, in prompts of a given number of tokens; ``None``
when KV made for such a prompt is valid for no other."""
KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]``."""
WarmState = Literal["kept", "missing", "too-long", "too-short"]
"""State of a document: in a tier that outlives this process; in no such tier; too long to fit behind the sink prefix;
shorter than the minimum for a chunk."""


class Found(NamedTuple):
    """A chunk's entry and where it came from."""

    entry: ChunkKV
    tier: str | None
    """The tier that had it; ``None`` when it was filled just now."""
    reason: str | None
    """Why no tier had it, when it was filled."""


class Missing(NamedTuple):
    """A chunk that the store lacks."""

    key: ChunkKey
    reason: str


class ChunkCache:
    """Entries of one model, one format and one tenant."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        model: str,
        *,
        sink: Sequence[int],
        learned: LearnedSink | None = None,
        fingerprint: Fingerprint,
        share: HeadShare,
        max_positions: int | None,
        kv_format: KVFormat,
        device_pool: torch.Tensor | None = None,
    ) -> None:
        """``sink`` are the tokens that chunks are computed after, or stand-ins for a ``learned`` sink. ``share`` is
        the part of the model's KV that this process holds, ``kv_format`` the format of its entries, in the model's
        dtype."""
        share = share.cut(config.remote_layers)
        try:
            self.document_format = replace(kv_format, is_int8=config.entry_dtype == "int8")
        except ValueError as error:
            raise ConfigError(f"entry_dtype={config.entry_dtype}: {error}; use auto") from None
        """Format of the entries of documents. All other entries are exact, in the model's dtype."""
        self.store: ChunkStorageManager = open_store(config, device_pool, share, kv_format)
        store_key = StoreKey.from_environment()
        self._sealed = "" if store_key is None else f"-{store_key.id}"
        self.sink = tuple(sink)
        self.sink_identity = self.sink if learned is None else learned.digest
        """Value that distinguishes the sink from every other sink."""
        self._config = config
        self._model = model
        self._made_by = fingerprint
        self._max_positions = max_positions
        self._tails = kv_format.tails
        self._heads = str(share.heads) if config.per_head_storage else share.together
        self._fingerprints: dict[str | None, str] = {}

    def serves(self, length: int) -> bool:
        """Whether chunks can be reused in prompts of ``length`` tokens."""
        return self._made_by(length) is not None

    def fits(self, chunk_length: int, context: Sequence[int], length: int = ANY_LENGTH) -> bool:
        """Whether a chunk can be computed after ``context`` within the model's positions, and with the rotary
        tables of a prompt of ``length`` tokens. With a long context, both together may be longer than that prompt."""
        alone = len(context) + chunk_length
        if self._max_positions is not None and alone > self._max_positions:
            return False
        return alone <= length or self._made_by(alone) == self._made_by(length)

    @cached_property
    def max_stored_tokens(self) -> int | None:
        """Number of tokens of the longest chunk that the store has room for; ``None`` without a limit."""
        room = self.store.max_entry_bytes
        if room is None or self._max_positions is None:
            return None
        return bisect_right(range(1, self._max_positions + 1), room, key=self.document_format.nbytes)

    def context_of(self, prompt: ChunkedPrompt) -> tuple[int, ...]:
        """The tokens that the chunks of this prompt are computed after."""
        return chunk_context(self._config.chunk_context, prompt, self.sink)

    def key(self, tokens: Sequence[int], context: Sequence[int], length: int = ANY_LENGTH) -> ChunkKey:
        """The key of a chunk computed after ``context`` for prompts like one of ``length`` tokens."""
        [key] = self.keys([tokens], context, length)
        return key

    def keys(
        self, chunks: Iterable[Sequence[int]], context: Sequence[int], length: int = ANY_LENGTH
    ) -> list[ChunkKey]:
        """The keys of several chunks that are computed after the same ``context``."""
        hasher = ContentHasher(context, self._config.chunk_hash_algorithm)
        return [self.key_of_hash(hasher.hash(tokens), len(tokens), length) for tokens in chunks]

    def key_of_hash(
        self, digest: bytes, num_tokens: int, length: int = ANY_LENGTH, *, is_exact: bool = False
    ) -> ChunkKey:
        """The key of a chunk whose content hash is known. ``is_exact``: it has to be stored as it was computed."""
        fingerprint = self._fingerprint(length, "" if is_exact else self.document_format.numbers)
        return ChunkKey(digest, num_tokens, self._model, fingerprint, self._config.tenant, self._heads)

    def exact_key(self, tokens: Sequence[int], context: Sequence[int]) -> ChunkKey:
        """The key of tokens whose KV is stored as it was computed."""
        digest = ContentHasher(context, self._config.chunk_hash_algorithm).hash(tokens)
        return self.key_of_hash(digest, len(tokens), is_exact=True)

    def makes(self, key: ChunkKey) -> bool:
        """Whether a key is one of this cache."""
        return key == self.key_of_hash(key.content_hash, key.num_tokens, is_exact=not key.is_int8)

    def _fingerprint(self, length: int, numbers: str) -> str:
        made_by = self._made_by(length)
        if made_by not in self._fingerprints:
            if len(self._fingerprints) >= FINGERPRINTS_REMEMBERED:  # weights may change again and again
                self._fingerprints.clear()
            made = format_fingerprint(engine=made_by, sink=self.sink_identity, tails=self._tails)
            self._fingerprints[made_by] = made
        return marked(self._fingerprints[made_by], numbers) + self._sealed

    def find(
        self, chunks: Sequence[Sequence[int]], context: Sequence[int], length: int = ANY_LENGTH
    ) -> tuple[dict[tuple[int, ...], Found], dict[tuple[int, ...], Missing]]:
        """The chunks of a prompt of ``length`` tokens that the store has, and those that it lacks."""
        found: dict[tuple[int, ...], Found] = {}
        missing: dict[tuple[int, ...], Missing] = {}
        different = dict.fromkeys(map(tuple, chunks))
        keys, context = self.keys(different, context, length), tuple(context)
        absent = self.store.absent(keys)
        for chunk, key in zip(different, keys, strict=True):
            result = self.store.lookup(key, chunk, context, absent=absent)
            if result.entry is not None:
                found[chunk] = Found(result.entry, result.tier, None)
            else:
                assert result.reason is not None
                missing[chunk] = Missing(key, result.reason.value)
        return found, missing

    def put(self, entry: ChunkKV) -> None:
        """Store an entry. Does nothing without a fingerprint, which tells what KV depends on."""
        if self.serves(ANY_LENGTH):
            self.store.put(entry)

    def take_changes(self) -> dict[bytes, str | None]:
        """Chunks that were added, moved or removed since the last call, at the first call all stored ones: content
        hash, see ``EXACT`` → the fastest tier that now has the entry, if any."""
        return {self._told(key): tier for key, tier in self.store.take_changes().items() if self.makes(key)}

    def present(self) -> dict[bytes, str]:
        """All chunks: content hash, see ``EXACT`` → the fastest tier that has them."""
        return {self._told(info.key): info.tier for info in self.store.scan() if self.makes(info.key)}

    def _told(self, key: ChunkKey) -> bytes:
        is_exact_beside_others = self.document_format.is_int8 and not key.is_int8
        return key.content_hash + EXACT if is_exact_beside_others else key.content_hash

    def warm_states(self, chunks: Sequence[Sequence[int]], length: int = ANY_LENGTH) -> list[WarmState]:
        """Whether each document is stored for later processes, or can be, for prompts like one of ``length`` tokens.
        Reads no entry."""
        keys = self.keys(chunks, self.sink, length)
        lasting = self.store.lasting(keys)
        states: list[WarmState] = []
        for chunk, key in zip(chunks, keys, strict=True):
            if len(chunk) < self._config.min_chunk_tokens:
                states.append("too-short")
            elif not self.fits(len(chunk), self.sink, length):
                states.append("too-long")
            else:
                states.append("kept" if key in lasting else "missing")
        return states

    def get_stats(self) -> dict[str, Any]:
        """Counters of the store since start: ``hit_rate, total_chunks, current_memory_mb, cache_hits, …``."""
        return self.store.get_stats()

    def clear(self) -> None:
        """Drop this model's and tenant's entries from every tier; others in a shared directory stay. Slow tiers
        delete them in the background."""
        self.store.clear(self._is_own)

    def empty_memory(self) -> None:
        """Drop this model's and tenant's entries from memory. Disks and remote stores keep theirs."""
        self.store.empty_memory(self._is_own)

    def _is_own(self, key: ChunkKey) -> bool:
        return (key.model, key.tenant) == (self._model, self._config.tenant)

    def close(self) -> None:
        """Finish pending writes and close the tiers."""
        self.store.close()
