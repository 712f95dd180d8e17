"""The content address of a chunk, and the fingerprint of the format its KV is stored in."""

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import quote, unquote

import xxhash

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import ALL_HEADS, KEY_PART

HASH_BYTES = 16
MOST_TOKENS = 2**31
"""Exclusive upper limit of a chunk's tokens in a parsed key, which others may have written."""

LAYOUT_VERSION = 2
"""Part of every fingerprint. Increment it when the meaning of stored bytes changes."""
INT8 = "int8"
"""Prefix of the names of number formats in 8 bits."""
EXACT = b"="
"""Mark behind the content hash of an entry that is stored as it was computed, in reports of an engine whose documents
are in 8 bits. An exact copy of a document, which other engines may have stored, is not that engine's document."""


class _HashState(Protocol):
    """An incremental hash."""

    def update(self, data: bytes, /) -> None: ...

    def copy(self) -> Self: ...

    def digest(self) -> bytes: ...


HASH_ALGORITHMS: dict[str, Callable[[bytes], _HashState]] = {"xxhash": xxhash.xxh3_128, "sha256": hashlib.sha256}


class ContentHasher:
    """Hashes chunks that are computed after the same context. The context is hashed once, because it may be far
    longer than the chunks, and there may be many chunks."""

    def __init__(self, context: Sequence[int] = (), algorithm: str = "xxhash") -> None:
        if algorithm not in HASH_ALGORITHMS:
            raise ConfigError(f"unknown hash algorithm {algorithm!r}; choose one of {', '.join(HASH_ALGORITHMS)}")
        # The context's length goes first, so that moving a token between context and chunk changes the hash.
        self._of_context = HASH_ALGORITHMS[algorithm](_little_endian([len(context)]) + _little_endian(context))

    def hash(self, tokens: Sequence[int]) -> bytes:
        """128-bit hash of a chunk's tokens and of the context."""
        state = self._of_context.copy()
        state.update(_little_endian(tokens))
        return state.digest()[:HASH_BYTES]


def content_hash(tokens: Sequence[int], context: Sequence[int] = (), algorithm: str = "xxhash") -> bytes:
    """128-bit hash of a chunk's tokens and of the context tokens it was computed after."""
    return ContentHasher(context, algorithm).hash(tokens)


def _little_endian(numbers: Sequence[int]) -> bytes:
    words = array("i", numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def format_fingerprint(**fields: object) -> str:
    """Short digest of everything that determines the meaning of stored bytes.

    Two engines exchange entries only when dtype, geometry, rope, sink prefix and layout all agree.
    """
    text = json.dumps({"layout": LAYOUT_VERSION, **fields}, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())[:16]


def marked(fingerprint: str, numbers: str) -> str:
    """A fingerprint that ends in the name of the entries' number format (``KVFormat.numbers``). The name
    is legible, because the size of an entry has to be known before the entry is read."""
    return f"{fingerprint}.{numbers}" if numbers else fingerprint


@dataclass(frozen=True)
class ChunkKey:
    """The key of an entry: its content, for one model, one format and one tenant. It contains no position."""

    content_hash: bytes
    num_tokens: int
    model: str
    fingerprint: str
    tenant: str = "default"
    heads: str = ALL_HEADS
    """The model's KV heads in the entry: ``all``, or ``4-7of8`` on a tensor-parallel rank with only those heads, or
    ``4-7of8L0-31`` (with layers) if a remote store keeps each head separately, see ``core/heads.py``."""

    @property
    def numbers(self) -> str:
        """Name of the entry's number format, see ``KVFormat.numbers``. Engines with different number formats never
        find each other's documents, because their keys differ."""
        return self.fingerprint.partition("-")[0].partition(".")[2]

    @property
    def is_int8(self) -> bool:
        """Whether the entry is in 8 bits."""
        return self.numbers.startswith(INT8)

    @property
    def sealed_by(self) -> str | None:
        """Id of the store key that the entry is sealed with, if any. It is the end of the fingerprint."""
        return self.fingerprint.partition("-")[2] or None

    def __hash__(self) -> int:
        return hash(self.content_hash)  # nearly unique, and much faster than hashing all fields

    def __str__(self) -> str:
        digest, count = self.content_hash.hex(), str(self.num_tokens)
        parts = (self.tenant, self.model, self.fingerprint, self.heads, digest, count)
        return "@".join(quote(part, safe="") for part in parts)

    @classmethod
    def parse(cls, text: str) -> "ChunkKey":
        """Inverse of ``str(key)``; raises ``ValueError`` on anything else."""
        tenant, model, fingerprint, heads, digest, num_tokens = (unquote(part) for part in text.split("@"))
        key = cls(bytes.fromhex(digest), int(num_tokens), model, fingerprint, tenant, heads)
        known = len(key.content_hash) == HASH_BYTES and 0 <= key.num_tokens < MOST_TOKENS
        if not known or not KEY_PART.fullmatch(heads) or str(key) != text:
            raise ValueError(f"not a chunk key: {text!r}")
        return key
