"""``/kvmosaic/``: manages stored documents, for clients with the admin key."""

import json
import logging
import re
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvmosaic.core.admin_key import AdminKey
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.engines.vllm.http.caretaker import Caretaker, RefusedError

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

PREFIX = "/kvmosaic/"
"""Prefix of the paths that this application answers."""
MAX_BODY = 16 * 2**20
"""Maximum size of a request's body, in bytes."""
MAX_LISTED = 10_000
"""Maximum number of entries in a list."""
USUALLY_LISTED = 100
_HASH = re.compile(r"[0-9a-f]{32}")


class AdminApp:
    """An ASGI application for paths that begin with ``/kvmosaic/``, of a server whose ``app.state`` is vLLM's.

    ============================================ ==============================================
    ``GET /kvmosaic/documents``                  list documents, ``?limit=100``, ``?text=1``
    ``POST /kvmosaic/documents``                 ``{"text": …}``: fill a document
    ``POST /kvmosaic/documents/delete``          ``{"text": …}``: delete a document
    ``POST /kvmosaic/documents/{hash}/pin``      protect it from eviction; ``/unpin``: undo that
    ``DELETE /kvmosaic/documents/{hash}``        delete a document
    ``DELETE /kvmosaic/documents``               delete all of this model and tenant
    ============================================ ==============================================
    """

    def __init__(self, key: AdminKey) -> None:
        self._key = key
        self._caretaker: Caretaker | None = None

    @classmethod
    def from_environment(cls) -> "AdminApp | None":
        """The application, if there is an admin key."""
        key = AdminKey.from_environment()
        return None if key is None else cls(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Its body is not read before its key was verified."""
        request = Request(scope, receive)
        headers = {}
        if self._key.opens(request.headers.get("authorization")):
            status, answer = await self._answered(request)
        else:
            status, answer = HTTPStatus.UNAUTHORIZED, {"error": "the admin key is missing or wrong"}
            headers["WWW-Authenticate"] = "Bearer"
        await JSONResponse(answer, status, headers)(scope, receive, send)

    async def _answered(self, request: Request) -> tuple[int, dict[str, Any]]:
        try:
            return HTTPStatus.OK, await self._do(request)
        except RefusedError as error:
            return error.status, {"error": str(error)}
        except KvmosaicError as error:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except Exception:
            logger.exception("an administrator's request failed")
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the request failed; the server's log says why"}

    async def _do(self, request: Request) -> dict[str, Any]:
        root = request.scope.get("root_path", "")
        words = request.scope["path"].removeprefix(root).removeprefix(PREFIX).split("/")
        care = self._engines(request.app.state)
        match request.method, words:
            case "GET", ["documents"]:
                shows_text = request.query_params.get("text") == "1"
                if shows_text and not care.config.admin_shows_text:
                    raise RefusedError(403, "texts are not shown; see the setting admin_shows_text")
                return await care.listed(_limit(request.query_params.get("limit")), shows_text=shows_text)
            case "POST", ["documents"]:
                return await care.warm(await _text(request))
            case "POST", ["documents", "delete"]:
                return await care.delete_text(await _text(request))
            case "POST", ["documents", digest, ("pin" | "unpin") as action]:
                return await care.pin(_hash(digest), is_pinned=action == "pin")
            case "DELETE", ["documents", digest]:
                return await care.delete(_hash(digest))
            case "DELETE", ["documents"]:
                return await care.clear()
        raise RefusedError(404, f"there is no {request.method} {request.scope['path'][:200]}")

    def _engines(self, state: Any) -> Caretaker:
        if self._caretaker is None:
            self._caretaker = Caretaker(state.vllm_config, state.engine_client)
        return self._caretaker


def _limit(given: str | None) -> int:
    if given is None:
        return USUALLY_LISTED
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise RefusedError(422, "limit: must be a number")
    return min(int(given), MAX_LISTED)


def _hash(given: str) -> str:
    if not _HASH.fullmatch(given):
        raise RefusedError(422, "a document's hash has 32 hexadecimal digits")
    return given


async def _text(request: Request) -> str:
    """The text in a request's body."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise RefusedError(413, f"the body has more than {MAX_BODY} bytes")
    try:
        sent = json.loads(body)
        text = sent.get("text") if isinstance(sent, dict) else None
        if isinstance(text, str) and text.strip():
            text.encode()  # JSON can contain half of a character, which no tokenizer takes
            return text
    except (ValueError, RecursionError):
        pass
    raise RefusedError(422, 'the body must be {"text": "…"}')
