"""Content hashes that name the chunks of a request in the store."""

import hashlib

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.key import ContentHasher
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.identity import chunk_context
from kvmosaic.engines.vllm.messages import Adapter


def salt_of(cache_salt: str | None, adapter: Adapter | None) -> bytes | None:
    """Bytes that separate a request's chunks from the same tokens of others: its ``cache_salt``, which also separates
    clients in vLLM's prefix cache, and its adapter's weights."""
    # JSON can contain an unpaired surrogate.
    salt = None if cache_salt is None else cache_salt.encode(errors="surrogatepass")
    # No text begins with this byte in UTF-8, so no client's salt can imitate an adapter.
    return salt if adapter is None else b"\xff" + adapter.digest + (salt or b"")


class ChunkDigests:
    """Content hashes of the spans of one prompt, and the context that chunks are computed after. The context may
    depend on ``first``, the position where the prompt's first chunk begins."""

    def __init__(
        self, config: ChunkCacheConfig, sink: tuple[int, ...], prompt: ChunkedPrompt, salt: bytes | None
    ) -> None:
        """``salt``: from :func:`salt_of`."""
        self._config = config
        self._sink = sink
        self._prompt = prompt
        self._salt = salt
        self._contexts: dict[int, tuple[tuple[int, ...], ContentHasher]] = {}
        """Contexts and their hashers by ``first``, of which there are few values; a context may be as long as the
        prompt."""

    def context(self, first: int) -> tuple[int, ...]:
        """Tokens that chunks are computed after."""
        return self._after(first)[0]

    def digest(self, span: Span, first: int) -> bytes:
        """Content hash of a chunk."""
        digest = self._after(first)[1].hash(self._prompt.token_array[span.start : span.end])
        if self._salt is None:
            return digest
        return hashlib.sha256(self._salt + digest).digest()[: len(digest)]

    def _after(self, first: int) -> tuple[tuple[int, ...], ContentHasher]:
        if first not in self._contexts:
            begun = ChunkedPrompt(self._prompt.token_ids, (Span(first, first + 1),))
            context = chunk_context(self._config.chunk_context, begun, self._sink)
            self._contexts[first] = context, ContentHasher(context, self._config.chunk_hash_algorithm)
        return self._contexts[first]
