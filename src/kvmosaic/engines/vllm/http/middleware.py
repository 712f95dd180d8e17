"""The middleware of vLLM's HTTP server: names documents, passes reports on to clients, lets administrators in."""

import logging
from threading import Thread
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE, AdminKey
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.engines.vllm.arguments import CONNECTOR
from kvmosaic.engines.vllm.compat.api_server import ServedEngine, served_engine, watch_transfer_params
from kvmosaic.engines.vllm.http.admin import PREFIX, AdminApp
from kvmosaic.engines.vllm.http.answer import HEADER, AnswerWithReport
from kvmosaic.engines.vllm.http.page import PATHS, PageApp
from kvmosaic.engines.vllm.http.recent import RecentRequests
from kvmosaic.engines.vllm.http.report import ReportNote, ReportRoutes, keep_report
from kvmosaic.engines.vllm.http.request import FIELDS, DocumentNamer, NamedRequest
from kvmosaic.engines.vllm.http.template import say_which_sources_work

logger = logging.getLogger(__name__)


class ChunkMiddleware:
    """For ``vllm serve --middleware kvmosaic.vllm.ChunkMiddleware``; ``kvmosaic serve`` adds it by itself.

    It adds ``kv_transfer_params`` to requests that generate text, and never changes what the model reads. With an
    engine that has no chunk cache it does nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._admin = AdminApp.from_environment()
        self._page: PageApp | None = None
        self._page_pass: str | None = None
        self._config: ChunkCacheConfig | None = None
        self._has_looked = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on any other event of the server."""
        config = self._engine_config(scope.get("app"))  # also when the server starts
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if self._page is not None and path in PATHS:
            await self._page(scope, receive, send)
            return
        if config is not None and self._admin is not None and path.startswith(PREFIX):
            await self._admin(scope, receive, send)
            return
        if config is None or path not in FIELDS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        note = ReportNote()
        keep_report(note)
        if config.clients_get_reports:
            note.is_asked_for = (HEADER, b"report") in ((name, value.lower()) for name, value in scope["headers"])
            send = AnswerWithReport(send, note)
        namer = DocumentNamer(config, path, note, self._page_pass)
        await self._app(scope, NamedRequest(scope, receive, namer), send)

    def _engine_config(self, app: Any) -> ChunkCacheConfig | None:
        """The engine's settings, if it has a chunk cache. They are looked up again until there is an engine."""
        engine = None if self._has_looked else served_engine(app)
        if engine is None:
            return self._config
        self._has_looked = True
        if engine.connector == CONNECTOR:
            try:
                self._config = load_config(engine.model_config.model, **engine.settings)
            except KvmosaicError as error:
                logger.error("requests are served without named documents, as the settings cannot be read: %s", error)
            else:
                self._watch(engine, self._config)
            arguments = engine.model_config, engine.chat_template
            Thread(target=say_which_sources_work, args=arguments, daemon=True).start()
        return self._config

    def _watch(self, engine: ServedEngine, config: ChunkCacheConfig) -> None:
        """Follow reports from the engine to clients and to the page."""
        key = AdminKey.from_environment()
        recent = None
        if config.chunk_page and key is None:
            logger.error("chunk_page: there is no page without an admin key; set %s", ADMIN_KEY_VARIABLE)
        elif config.chunk_page and key is not None:
            recent = RecentRequests(shows_text=config.admin_shows_text)
            self._page, self._page_pass = PageApp(key, config, engine, recent), key.page_pass
        watch_transfer_params(engine.client, ReportRoutes(config, recent).taker)
