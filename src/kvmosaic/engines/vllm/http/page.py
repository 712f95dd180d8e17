"""The page at ``/kvmosaic/``: what the server's latest requests reused, for people with the admin key."""

import asyncio
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from kvmosaic.core.admin_key import AdminKey
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.mosaic import content_policy, live_page
from kvmosaic.engines.vllm.compat.api_server import ServedEngine
from kvmosaic.engines.vllm.http.recent import RecentRequests
from kvmosaic.engines.vllm.http.statistics import server_statistics
from kvmosaic.engines.vllm.setup import load_tokenizer

PATHS = frozenset({"/kvmosaic", "/kvmosaic/", "/kvmosaic/requests", "/kvmosaic/stats"})
"""Paths of the page and of its data."""
MAX_SEEN = 64
"""Maximum number of API servers that a page may say to have seen."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
CHALLENGE = {"WWW-Authenticate": 'Basic realm="kvmosaic", charset="UTF-8"'}
"""Header that makes a browser ask for the key."""

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


class PageApp:
    """An ASGI application for :data:`PATHS`. It only reads. Browsers send a known key with every request, even with
    those that other sites trigger, so no request may change anything.

    ========================== =====================================================================
    ``GET /kvmosaic/``         the page; ``/kvmosaic`` leads to it
    ``GET /kvmosaic/requests`` the latest requests; ``?seen=PROCESS.NUMBER,…`` leaves out known ones
    ``GET /kvmosaic/stats``    numbers since the engine started
    ========================== =====================================================================
    """

    def __init__(self, key: AdminKey, config: ChunkCacheConfig, engine: ServedEngine, recent: RecentRequests) -> None:
        self._key = key
        self._config = config
        self._engine = engine
        self._recent = recent
        self._tokenizer: Any = None
        self._has_looked = False
        """Whether the tokenizer was loaded, or could not be."""
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization")
        if not (self._key.opens(given) or self._key.opens_for_browser(given)):
            told = {"error": "the admin key is missing or wrong; in a browser it is the password, for any user name"}
            return JSONResponse(told, HTTPStatus.UNAUTHORIZED, HEADERS | CHALLENGE)
        if request.method != "GET":
            return JSONResponse({"error": "the page only answers GET"}, HTTPStatus.METHOD_NOT_ALLOWED, HEADERS)
        try:
            return await self._page(request)
        except Exception:
            logger.exception("the page cannot be shown")
            told = {"error": "the page cannot be shown; the server's log says why"}
            return JSONResponse(told, HTTPStatus.INTERNAL_SERVER_ERROR, HEADERS)

    async def _page(self, request: Request) -> Response:
        match request.scope["path"].rpartition("/")[2]:
            case "requests":
                latest = await asyncio.to_thread(self._requests, request.query_params.get("seen", ""))
                return Response(latest, headers=HEADERS, media_type="application/json")
            case "stats":
                stats = await asyncio.to_thread(server_statistics, self._config, self._engine)
                return JSONResponse(stats, headers=HEADERS)
            case "kvmosaic":
                # Relative, as a proxy may have its own path before ours.
                return RedirectResponse("kvmosaic/", HTTPStatus.TEMPORARY_REDIRECT, HEADERS)
        return HTMLResponse(live_page(), headers=HEADERS | {"Content-Security-Policy": content_policy()})

    def _requests(self, seen: str) -> bytes:
        process = self._recent.process
        known = dict(each.partition(".")[::2] for each in seen[: 32 * MAX_SEEN].split(",")[:MAX_SEEN])
        number = known.get(process, "")
        after = int(number) if number.isascii() and number.isdigit() else 0
        latest = self._recent.after(after, self._decoder())
        return b'{"process":"%s","requests":%s}' % (process.encode(), latest)

    def _decoder(self) -> Callable[[list[int]], str] | None:
        """The function that turns tokens into text; ``None`` if texts may not be shown, or without a tokenizer.
        Loading the tokenizer takes a second, once."""
        if not self._config.admin_shows_text:
            return None
        with self._lock:
            if not self._has_looked:
                self._has_looked = True
                try:
                    self._tokenizer = load_tokenizer(self._engine.model_config)
                except Exception:
                    logger.exception("the page shows no texts, as the tokenizer cannot be loaded")
        return None if self._tokenizer is None else self._tokenizer.decode
