"""The latest requests of an API server, as its page shows them."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from kvmosaic.core.limits import shown_id
from kvmosaic.engines.vllm.compat.api_server import Answered

MAX_REQUESTS = 50
"""Number of requests that are remembered."""
SHOWN_TOKENS = 16
"""Number of a document's first tokens that are shown, by which people recognise it."""
SHOWN_TEXTS = 64
"""Maximum number of documents of a request whose first tokens are shown."""

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


class _Request(NamedTuple):
    number: int
    fields: bytes
    """A JSON object."""
    first_tokens: tuple[tuple[int, ...], ...]
    """The first tokens of its documents, if they may be shown."""


class RecentRequests:
    """Remembers the latest requests. Thread-safe."""

    def __init__(self, *, shows_text: bool) -> None:
        """``shows_text``: whether the first words of documents are remembered."""
        self.process = secrets.token_hex(4)
        """Name of this process, by which a page tells several API servers apart."""
        self._shows_text = shows_text
        self._requests: deque[_Request] = deque(maxlen=MAX_REQUESTS)
        self._number = 0
        self._lock = threading.Lock()

    def add(self, answered: Answered) -> None:
        """Remember a request with a report. A failure is logged and costs the request its place on the page only."""
        try:
            if isinstance(answered.params, Mapping):
                self._add(answered)
        except Exception:
            logger.exception("a request cannot be shown on the page")

    def _add(self, answered: Answered) -> None:
        chunks = answered.params.get("chunks", ()) if self._shows_text else ()
        spans = [chunk["span"] for chunk in chunks[:SHOWN_TEXTS]]
        first = tuple(
            tuple(answered.prompt[span["start"] : min(span["end"], span["start"] + SHOWN_TOKENS)]) for span in spans
        )
        with self._lock:
            self._number += 1
            fields = {
                "number": self._number,
                "time": time.time(),
                "id": shown_id(answered.request_id),
                "prompt_tokens": len(answered.prompt),
                "cached_tokens": answered.cached_tokens,
                "first_token_ms": None if answered.first_token_s is None else answered.first_token_s * 1e3,
                "report": answered.params,
            }
            self._requests.append(_Request(self._number, msgspec.json.encode(fields), first))

    def after(self, number: int, decode: Callable[[list[int]], str] | None) -> bytes:
        """The remembered requests behind ``number``, in order, as a JSON list. With ``decode``, which turns tokens
        into text, they have the first words of their documents."""
        with self._lock:
            requests = [each for each in self._requests if each.number > number]
        return b"[%s]" % b",".join(self._shown(each, decode) for each in requests)

    @staticmethod
    def _shown(request: _Request, decode: Callable[[list[int]], str] | None) -> bytes:
        if decode is None or not request.first_tokens:
            return request.fields
        texts = msgspec.json.encode([decode(list(tokens)) for tokens in request.first_tokens])
        return b'%s,"texts":%s}' % (request.fields[:-1], texts)
