"""Keys of entries, and of single heads of entries, in a remote store."""

from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

from kvmosaic.core.heads import HeadRange
from kvmosaic.core.key import ChunkKey

PREFIX = "kvmosaic-1:"
"""Prefix of all our keys. The number changes when the meaning of values changes."""
ALL_LAYERS = "all"


class HeadPoolKey(NamedTuple):
    """One KV head of one chunk, in some layers. Heads and layers are numbered in the whole model, so the key is the
    same for every engine that has them, whatever its parallel sizes."""

    tenant: str
    model: str
    fingerprint: str
    content_hash: bytes
    num_tokens: int
    first_layer: int
    last_layer: int
    head: int
    heads: int
    """Number of KV heads of the model."""

    def __str__(self) -> str:
        """``kvmosaic-1:{tenant}@{model}@fmt:{fingerprint}@{hash}@{tokens}@L:{first}-{last}@head:{head}of{heads}``."""
        [name] = names_of(self.entry_key)
        return name

    @classmethod
    def of(cls, key: ChunkKey, head: HeadRange) -> "HeadPoolKey":
        """The key of a single ``head`` of the entry of ``key``."""
        layers = head.first_layer, head.last_layer
        owner = key.tenant, key.model, key.fingerprint
        return cls(*owner, key.content_hash, key.num_tokens, *layers, head.first, head.total)

    @property
    def entry_key(self) -> ChunkKey:
        """The key of an entry with just this head. The value is written as that entry."""
        owner = self.model, self.fingerprint, self.tenant
        return ChunkKey(self.content_hash, self.num_tokens, *owner, str(self._range))

    @property
    def _range(self) -> HeadRange:
        return HeadRange(self.head, self.head, self.heads, self.first_layer, self.last_layer)


def names_of(key: ChunkKey) -> list[str]:
    """Remote keys of an entry's values: one per head, or per head and some layers, if its key names heads and layers,
    otherwise a single one."""
    ends = _ends_of(key.heads)
    if ends is None:
        return [remote_key(key)]
    chunk = _chunk(key.tenant, key.model, key.fingerprint, key.content_hash, key.num_tokens)
    return [chunk + end for end in ends]


def part_keys(key: ChunkKey) -> list[str]:
    """For each of :func:`names_of` the key, as text, of an entry with just this part."""
    heads = HeadRange.parse(key.heads)
    if heads is None:
        return [str(key)]
    tenant, model, fingerprint, _, digest, tokens = str(key).split("@")
    return [f"{tenant}@{model}@{fingerprint}@{head}@{digest}@{tokens}" for head in heads.parts()]


def remote_key(key: ChunkKey) -> str:
    """``kvmosaic-1:{tenant}@{model}@fmt:{fingerprint}@{hash}@{tokens}@L:all@head:{heads}``, of an entry whose heads
    are stored together.

    Every part is quoted, so that no text of one tenant can be read as another's key. The part of the chunk's KV that
    the value holds comes last: values whose keys differ in nothing else belong together, see :func:`group_of`.
    """
    chunk = _chunk(key.tenant, key.model, key.fingerprint, key.content_hash, key.num_tokens)
    return f"{chunk}@L:{ALL_LAYERS}@head:{key.heads}"


def parse_remote_key(text: str) -> ChunkKey | HeadPoolKey:
    """Inverse of :func:`remote_key` and of ``str(head_pool_key)``; raises ``ValueError`` on anything else."""
    tenant, model, fingerprint, digest, tokens, layers, head = text.removeprefix(PREFIX).split("@")
    owner = unquote(model), unquote(fingerprint.removeprefix("fmt:")), unquote(tenant)
    key = ChunkKey(bytes.fromhex(digest), int(tokens), *owner, head.removeprefix("head:"))
    if layers == f"L:{ALL_LAYERS}":
        if remote_key(key) != text or HeadRange.parse(key.heads) or ChunkKey.parse(str(key)) != key:
            raise ValueError(f"not the key of an entry: {text!r}")
        return key
    number, _, total = key.heads.partition("of")
    heads = HeadRange.parse(f"{number}-{number}of{total}L{layers.removeprefix('L:')}")
    if heads is None:
        raise ValueError(f"not the key of a head: {text!r}")
    parsed = HeadPoolKey.of(key, heads)
    if str(parsed) != text or ChunkKey.parse(str(parsed.entry_key)) != parsed.entry_key:
        raise ValueError(f"not the key of a head: {text!r}")
    return parsed


def group_of(text: str) -> str:
    """Common start of the keys of all parts of one chunk's KV, which a store should keep or evict together."""
    return text.rsplit("@", 2)[0]


def _chunk(tenant: str, model: str, fingerprint: str, content_hash: bytes, num_tokens: int) -> str:
    return f"{_start(tenant, model, fingerprint)}{content_hash.hex()}@{num_tokens}"


@lru_cache(maxsize=1024)
def _start(tenant: str, model: str, fingerprint: str) -> str:
    """Cached, because quoting takes longer than the rest of a lookup and is the same for thousands of keys."""
    parts = "@".join(quote(part, safe="") for part in (tenant, model))
    return f"{PREFIX}{parts}@fmt:{quote(fingerprint, safe='')}@"


@lru_cache(maxsize=1024)
def _ends_of(heads: str) -> list[str] | None:
    parsed = HeadRange.parse(heads)
    if parsed is None:
        return None
    return [f"@L:{part.first_layer}-{part.last_layer}@head:{part.first}of{part.total}" for part in parsed.parts()]
