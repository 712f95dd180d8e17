"""What entries are called in a remote store."""

from functools import lru_cache
from urllib.parse import quote, unquote

from kvmosaic.core.key import ChunkKey

PREFIX = "kvmosaic-1:"
"""Of all our keys; the number changes when values mean something else."""
ALL_LAYERS = "all"


def remote_key(key: ChunkKey) -> str:
    """``kvmosaic-1:{tenant}@{model}@fmt:{fingerprint}@{hash}@{tokens}@L:all@head:{heads}``.

    Every part is quoted, so that no text of one tenant can be read as another's key. What part of the chunk's KV the
    value holds comes last: values that differ in nothing else belong together, see :func:`group_of`.
    """
    start, end = _ends(key.tenant, key.model, key.fingerprint, key.heads)
    return f"{start}{key.content_hash.hex()}@{key.num_tokens}{end}"


def parse_remote_key(text: str) -> ChunkKey:
    """Inverse of :func:`remote_key`; raises ``ValueError`` on anything else."""
    tenant, model, fingerprint, digest, tokens, _, heads = text.removeprefix(PREFIX).split("@")
    key = ChunkKey(
        bytes.fromhex(digest),
        int(tokens),
        unquote(model),
        unquote(fingerprint.removeprefix("fmt:")),
        unquote(tenant),
        heads.removeprefix("head:"),
    )
    if remote_key(key) != text or ChunkKey.parse(str(key)) != key:
        raise ValueError(f"not the key of an entry: {text!r}")
    return key


def group_of(text: str) -> str:
    """What the keys of all parts of one chunk's KV have in common: a store should keep or evict them together."""
    return text.rsplit("@", 2)[0]


@lru_cache(maxsize=1024)
def _ends(tenant: str, model: str, fingerprint: str, heads: str) -> tuple[str, str]:
    """Quoting takes longer than all the rest of a lookup, and is the same for thousands of keys."""
    parts = "@".join(quote(part, safe="") for part in (tenant, model))
    return f"{PREFIX}{parts}@fmt:{quote(fingerprint, safe='')}@", f"@L:{ALL_LAYERS}@head:{heads}"
