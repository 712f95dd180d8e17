"""Names the documents of a request before the server reads it. Everything else stays as the client sent it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.core.sources import find_seams, find_sources, has_too_many_parts
from kvmosaic.engines.vllm.http.body import RequestBody
from kvmosaic.engines.vllm.http.report import ReportNote
from kvmosaic.engines.vllm.parameters import PAGE_PARAMETER

FIELDS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("documents", "messages"),
    "/v1/messages": ("system", "messages"),
    "/v1/responses": ("input",),
    "/v1/completions": (),
}
"""Paths of requests that generate text, and the fields of each that may hold documents."""
MAX_BODY = 32 * 2**20
"""Maximum size of a request that is searched for documents, in bytes."""
MAX_CHARACTERS = 2**22
"""Maximum number of characters of the documents that are named: about a million tokens."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentNamer:
    """Adds parameters to the bodies of requests."""

    config: ChunkCacheConfig
    path: str
    note: ReportNote
    page_pass: str | None = None
    """With it, the engine reports on a request for the page; ``None`` without a page."""

    def name_documents(self, sent: bytes) -> bytes:
        """The body, with parameters for its documents and its report added."""
        try:
            body = RequestBody(sent)
            added = self._documents(body)
            asked = body.parameter("report")
            if self.note.is_asked_for and asked is None:
                added["report"] = True
            if self.page_pass is not None:
                added[PAGE_PARAMETER] = self.page_pass
            self.note.is_asked_for |= asked is True
            return body.with_parameters(added) if added else sent
        except (ValueError, RecursionError):  # the server reports the error, or can read the body anyway
            return sent
        except Exception:  # any other failure: the request is served without named documents
            logger.exception("could not name the documents of a request")
            return sent

    def _documents(self, body: RequestBody) -> dict[str, Any]:
        named, config = body.documents(), self.config
        is_off = body.parameter("chunk_cache") is False or body.parameter("boundaries") is not None
        # With separators the question is needed, whatever the sources of documents are.
        has_use = bool(config.sources - {"images", "auto"}) or config.chunk_separator is not None
        if is_off or named is None or len(named) > MAX_DOCUMENTS or not FIELDS[self.path] or not has_use:
            return {}  # also if the engine will refuse what the client named
        fields = body.read(FIELDS[self.path])
        if has_too_many_parts(fields):
            return {"chunk_cache": False}  # documents could be found over questions that nobody looked at
        found = find_sources(fields, config.sources, config.min_chunk_tokens)
        known = {name.strip() for name in named}
        further = [text for text in found.documents if text not in known][: MAX_DOCUMENTS - len(named)]
        if sum(map(len, further)) > MAX_CHARACTERS:
            further = []
        added: dict[str, Any] = {"documents": [*named, *further]} if further else {}
        seams = find_seams(fields, [*named, *further]) if body.parameter("seams") is None else []
        if len(seams) > MAX_DOCUMENTS:
            added["documents"] = []  # a document could be found over a question that the engine is not told of
        elif seams:
            added["seams"] = seams
        if config.chunk_separator and found.question and body.parameter("question") is None:
            added["question"] = found.question
        return added


class NamedRequest:
    """Gives the server the changed body. The client's body is read only when the server asks for it, so that nothing
    is read of a request that the server refuses by its headers."""

    def __init__(self, scope: Scope, receive: Receive, namer: DocumentNamer) -> None:
        self._scope = scope
        self._receive = receive
        self._namer = namer
        self._is_read = False

    async def __call__(self) -> Message:
        """The next message of the client."""
        if self._is_read:
            return await self._receive()
        self._is_read = True
        body, has_more = bytearray(), True
        while has_more and len(body) <= MAX_BODY:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        sent = bytes(body)
        if len(sent) <= MAX_BODY:
            sent = self._namer.name_documents(sent)
            self._set_length(len(sent))
        return {"type": "http.request", "body": sent, "more_body": has_more}

    def _set_length(self, length: int) -> None:
        """Set the length in the scope itself, where the server looks after it has read the body."""
        self._scope["headers"] = [
            (name, b"%d" % length if name == b"content-length" else value) for name, value in self._scope["headers"]
        ]
