"""Manages the stored documents of a running engine, through the engine's client."""

import asyncio
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.documents import spellings
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.key import content_hash
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.sources import without_label
from kvmosaic.core.stand_ins import without_stand_ins
from kvmosaic.engines.identity import learned_sink, sink_of
from kvmosaic.engines.vllm.compat.api_server import run_request
from kvmosaic.engines.vllm.setup import load_tokenizer

WARM_SECONDS = 120.0
"""Timeout for filling a document, in seconds."""
WARM_TOKENS = 16
"""Number of tokens to decode while a document is filled: it is filled in steps that decode."""
SETTLE_SECONDS = 10.0


class RefusedError(KvmosaicError):
    """The request cannot be carried out. ``status`` is the HTTP status."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class _Document(NamedTuple):
    """A document as a chunk."""

    digest: str
    tokens: int
    prompt: list[int]
    """Tokens of a prompt that contains it."""


class Caretaker:
    """Manages the documents of one engine. ``vllm_config`` is the engine's, ``client`` is the HTTP server's client of
    it."""

    def __init__(self, vllm_config: Any, client: Any) -> None:
        self._model = vllm_config.model_config
        self._client = client
        self.config: ChunkCacheConfig = load_config(
            self._model.model, **vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        self._tokenizer: Any = None
        self._parser: ChunkTokenParser | None = None
        self._lock = threading.Lock()
        self._sink: tuple[int, ...] = ()

    async def listed(self, most: int, *, shows_text: bool) -> dict[str, Any]:
        """Totals of the stored entries, and the newest ``most`` of them with their bytes on all ranks."""
        ranks = await self._ask("chunk_cache_documents", most, shows_text)
        total = {name: sum(rank[name] for rank in ranks) for name in ("entries", "bytes")}
        total["entries"] //= len(ranks)
        nbytes: dict[str, int] = {}
        for rank in ranks:
            for each in rank["documents"]:
                nbytes[each["hash"]] = nbytes.get(each["hash"], 0) + each["bytes"]
        documents = [{**each, "bytes": nbytes[each["hash"]]} for each in ranks[0]["documents"]]
        if shows_text:
            await asyncio.to_thread(self._read_tokenizer)
            documents = [self._with_text(each) for each in documents]
        return {**total, "documents": documents}

    async def warm(self, text: str) -> dict[str, Any]:
        """Fill a document, unless it is already stored."""
        text = without_label(text)  # as in requests that send it as a part
        document = await self.document(text)
        told = {"hash": document.digest, "tokens": document.tokens}
        if await self._holds(document):
            return {**told, "state": "known"}
        await self._refuse_what_cannot_be_filled(document)
        answer = max(1, min(WARM_TOKENS, self._model.max_model_len - len(document.prompt)))
        deadline = time.monotonic() + WARM_SECONDS
        while time.monotonic() < deadline:
            await run_request(self._client, document.prompt, answer, {"documents": [text]})
            if await self._holds(document):
                return {**told, "state": "filled"}
            document = await self.document(text)
        raise RefusedError(503, f"not filled within {WARM_SECONDS:.0f} s; the store or the engine's blocks are full")

    async def pin(self, digest: str, *, is_pinned: bool) -> dict[str, Any]:
        """Protect a document from eviction, or stop protecting it."""
        await self._all_have(digest, await self._ask("chunk_cache_pin", digest, is_pinned))
        return {"hash": digest, "pinned": is_pinned}

    async def delete(self, digest: str) -> dict[str, Any]:
        """Delete a document from all tiers."""
        await self._all_have(digest, await self._ask("chunk_cache_delete", digest))
        await self._settle()
        return {"hash": digest, "deleted": True}

    async def delete_text(self, text: str) -> dict[str, Any]:
        """Delete a document from all tiers: as requests name it and as parts hold it, whose labels do not count, and
        as prompts had it in which JSON escaped it."""
        forms = dict.fromkeys(form for name in (without_label(text), text.strip()) for form in spellings(name))
        documents = [await self.document(form) for form in forms]
        counts = [await self._ask("chunk_cache_delete", document.digest) for document in documents]
        await self._all_have(documents[0].digest, [sum(each) for each in counts])
        await self._settle()
        return {"hash": documents[0].digest, "deleted": True}

    async def clear(self) -> dict[str, Any]:
        """Delete all entries of the engine's model and tenant. Also empties vLLM's prefix cache, unless requests are
        running."""
        is_reset = bool(await self._client.reset_prefix_cache(reset_connector=True))
        await self._ask("chunk_cache_clear")
        await self._settle()
        return {"cleared": True, "prefix_cache_cleared": is_reset}

    async def document(self, text: str) -> _Document:
        """The chunk that requests with this text look for."""
        if self.config.chunk_context != "alone":
            raise RefusedError(409, "with chunk_context=system a document's hash depends on the system prompt")
        return await asyncio.to_thread(self._chunk_of, text)

    def _chunk_of(self, text: str) -> _Document:
        parser = self._read_tokenizer()
        # Each prompt begins with another random word: a document that vLLM's prefix cache has is not filled.
        prompt = parser.parse_named(f"{secrets.token_hex(8)}\n\n{text}\n\nb", [text]).prompt
        if not prompt.chunks:
            least = self.config.min_chunk_tokens
            reason = f"fewer than {least} tokens, or role markers inside"
            raise RefusedError(422, f"this text cannot be a document: {reason}")
        tokens = prompt.tokens_of(prompt.chunks[0])
        digest = content_hash(tokens, self._sink, self.config.chunk_hash_algorithm)
        return _Document(digest.hex(), len(tokens), list(prompt.token_ids))

    def _read_tokenizer(self) -> ChunkTokenParser:
        """The parser, made on first use: loading the tokenizer takes a second. Several requests may need it at
        once."""
        with self._lock:
            if self._parser is None:
                self._tokenizer = load_tokenizer(self._model)
                self._sink = self._sink_of(self._tokenizer)
                self._parser = ChunkTokenParser(self._tokenizer, None, self.config.min_chunk_tokens)
            return self._parser

    def _sink_of(self, tokenizer: Any) -> tuple[int, ...]:
        learned = learned_sink(self.config)
        return sink_of(self.config, learned, self._model.hf_text_config.bos_token_id, tokenizer)

    def _with_text(self, described: Mapping[str, Any]) -> dict[str, Any]:
        rest = dict(described)
        tokens = rest.pop("first_tokens")
        is_readable = tokens is not None and self._tokenizer is not None
        return {**rest, "text": self._tokenizer.decode(without_stand_ins(tokens)) if is_readable else None}

    async def _refuse_what_cannot_be_filled(self, document: _Document) -> None:
        if "documents" not in self.config.allowed_parameters:
            raise RefusedError(409, "client_parameters must allow documents; filling sends requests that name them")
        if self.config.miss_policy == "never":
            raise RefusedError(409, "with miss_policy=never nothing is stored")
        longest = self._model.max_model_len
        if len(document.prompt) >= longest or len(self._sink) + document.tokens > longest:
            raise RefusedError(422, f"{document.tokens} tokens do not fit into the model's {longest} positions")
        [stats, *_] = await self._ask("chunk_cache_stats")
        if stats["max_stored_tokens"] is not None and document.tokens > stats["max_stored_tokens"]:
            raise RefusedError(422, f"{document.tokens} tokens are more than any tier has room for")
        if stats["off_reason"] is not None:
            raise RefusedError(409, f"the chunk cache is off: {stats['off_reason']}")

    async def _holds(self, document: _Document) -> bool:
        return all(await self._ask("chunk_cache_holds", document.digest))

    @staticmethod
    async def _all_have(digest: str, counts: list[int]) -> None:
        if not any(counts):
            raise RefusedError(404, f"nothing is stored under {digest}")

    async def _settle(self) -> None:
        """Run a step, with which workers tell the scheduler which entries they no longer have."""
        with suppress(asyncio.TimeoutError):  # then a later step reports it
            await asyncio.wait_for(run_request(self._client, [0], 1), SETTLE_SECONDS)

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._client.collective_rpc(method, args=args)
        return answers
