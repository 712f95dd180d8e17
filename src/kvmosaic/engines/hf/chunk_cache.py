"""The embedded engine's chunk cache, which fills missing chunks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import ChunkKV, PackedKV
from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.learned_sink import LearnedSink
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.chunk_cache import ANY_LENGTH, ChunkCache, Found, Missing, WarmState
from kvmosaic.engines.hf.model import HFModel


class HFChunkCache(ChunkCache):
    """Entries of one model, one format and one tenant, computed by ``engine`` where they are missing."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        model: str,
        *,
        parser: ChunkTokenParser,
        engine: HFModel,
        learned: LearnedSink | None = None,
        **settings: Any,
    ) -> None:
        """``settings``: ``sink`` and ``max_positions``, as for :class:`ChunkCache`."""
        super().__init__(
            config,
            model,
            learned=learned,
            fingerprint=engine.fingerprint,
            share=engine.share,
            kv_format=engine.format,
            **settings,
        )
        self._sink_kv = None if learned is None else learned.kv(engine.format.dtype, engine.model.device)
        self._parser = parser
        self._engine = engine

    def find(
        self, chunks: Sequence[Sequence[int]], context: Sequence[int], length: int = ANY_LENGTH
    ) -> tuple[dict[tuple[int, ...], Found], dict[tuple[int, ...], Missing]]:
        self._engine.notice_weights()
        return super().find(chunks, context, length)

    def warm_states(self, chunks: Sequence[Sequence[int]], length: int = ANY_LENGTH) -> list[WarmState]:
        self._engine.notice_weights()
        return super().warm_states(chunks, length)

    def find_or_fill(self, chunks: Sequence[Sequence[int]], context: Sequence[int], length: int) -> list[Found]:
        """An entry for every chunk of a prompt of ``length`` tokens. Missing ones are filled together and
        stored; a repeated one is filled once."""
        found, missing = self.find(chunks, context, length)
        found |= self.fill_missing(missing, context, length)
        return [found[tuple(chunk)] for chunk in chunks]

    def fill_all(self, prompt: ChunkedPrompt) -> None:
        """Fill and store every missing chunk of a prompt that :meth:`fits`."""
        context, length = self.context_of(prompt), len(prompt.token_ids)
        fitting = [span for span in prompt.chunks if self.fits(len(span), context, length)]
        self.find_or_fill([prompt.tokens_of(span) for span in fitting], context, length)

    def fill_missing(
        self, missing: Mapping[tuple[int, ...], Missing], context: Sequence[int], length: int
    ) -> dict[tuple[int, ...], Found]:
        """Fill and store the chunks that :meth:`find` did not find."""
        if not missing:
            return {}
        entries = self.fill({lacking.key: chunk for chunk, lacking in missing.items()}, context, length)
        return {
            chunk: Found(entry, None, lacking.reason)
            for (chunk, lacking), entry in zip(missing.items(), entries, strict=True)
        }

    def fill(self, chunks: Mapping[ChunkKey, Sequence[int]], context: Sequence[int], length: int) -> list[ChunkKV]:
        """Compute the entries of chunks that are missing, together, and store them under their keys."""
        entries = []
        # With a learned sink, every context is that sink: chunk_context=system has no learned sink.
        tokens = () if self._sink_kv is not None else context
        computed = self._engine.fill(tokens, list(chunks.values()), length, sink=self._sink_kv)
        for (key, chunk), (k, v) in zip(chunks.items(), computed, strict=True):
            packed = PackedKV.of(k, v, self.document_format)
            entry = ChunkKV.from_packed(key, chunk, context, packed, "document")
            self.put(entry)
            entries.append(entry)
            self.store.wait_for_room()  # no request decodes meanwhile, so entries need not be dropped
        return entries

    def warm(self, documents: Iterable[str], prompt_length: int | None = None) -> int:
        """Fill and store these documents ahead of time, each as a chunk; returns how many were new.

        ``prompt_length`` is that of the prompts they are meant for, in tokens; it matters only to models with
        different rope tables for short and long prompts."""
        if self._config.chunk_context == "system":
            raise ConfigError("chunk_context=system: entries depend on the system prompt; documents cannot be warmed")
        if isinstance(documents, str):
            raise PromptError("warm() takes a list of documents, not one text")
        chunks = [self._parser.document_tokens(document) for document in documents]
        length = prompt_length or len(self.sink) + max(map(len, chunks), default=0)
        shortest = self._config.min_chunk_tokens
        chunks = [chunk for chunk in chunks if len(chunk) >= shortest and self.fits(len(chunk), self.sink, length)]
        if not chunks:
            return 0
        if not self.serves(length):
            raise ConfigError(f"this model's rope table is different for every prompt of {length} tokens or more")
        found = self.find_or_fill(chunks, self.sink, length)
        return len({item.entry.key for item in found if item.tier is None})
