"""Reports to clients about their documents: in a header, or at the end of a stream."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Send

from kvmosaic.engines.vllm.http.report import ReportNote

HEADER = b"x-kvmosaic"
"""Name of the header with which a request asks for a report, and of the header with which an answer has one."""
MAX_HEADER_TEXT = 200
"""Maximum length of a text in the header, in characters."""

_EVENT = b"data: "
_DONE = b"data: [DONE]\n\n"
_CHUNK_FIELDS = ("id", "object", "created", "model")


class AnswerWithReport:
    """Sends a client its answer, and the report if there is one."""

    def __init__(self, send: Send, note: ReportNote) -> None:
        self._send = send
        self._note = note
        self._stream: _StreamEnd | None = None

    async def __call__(self, message: Message) -> None:
        """Send the next message of the server."""
        if message["type"] == "http.response.start":
            headers = message.get("headers", [])
            if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
                self._stream = _StreamEnd(self._note) if self._note.is_asked_for else None
            elif self._note.report is not None:
                message = {**message, "headers": [*headers, (HEADER, header_value(self._note.report))]}
        elif message["type"] == "http.response.body" and self._stream is not None:
            piece = self._stream.change(message.get("body", b""), not message.get("more_body", False))
            message = {**message, "body": piece}
        await self._send(message)


def header_value(report: Mapping[str, Any]) -> bytes:
    """The report as compact JSON that is short enough for a header: chunks become counts by status, recomputed tokens
    their number, other lists their lengths."""
    return _json({name: _shortened(name, value) for name, value in report.items()})


def _shortened(name: str, value: Any) -> Any:
    if name == "chunks":
        return Counter(chunk["status"] for chunk in value)
    if name == "recomputed":
        return sum(end - start for start, end in value)
    if isinstance(value, (list, tuple, dict)):
        return len(value)
    return value[:MAX_HEADER_TEXT] if isinstance(value, str) else value


class _StreamEnd:
    """Adds the report to the end of a stream of server-sent events.

    A stream of the OpenAI API that ends with ``[DONE]`` gets one more chunk before that. It has no choices, like the
    chunk with the usage, which clients know. Other streams get a comment, which clients skip.
    """

    def __init__(self, note: ReportNote) -> None:
        self._note = note
        self._like: dict[str, Any] | None = None
        self._is_told = False

    def change(self, piece: bytes, is_last: bool) -> bytes:
        """The bytes to send instead of ``piece``, which holds whole events."""
        if self._like is None and piece.startswith(_EVENT):
            self._like = _chunk_fields(piece)
        if self._is_told or self._note.report is None:
            return piece
        if piece.endswith(_DONE):
            self._is_told = True
            chunk = {**(self._like or {}), "choices": [], "kv_transfer_params": self._note.report}
            return b"".join((piece[: -len(_DONE)], _EVENT, _json(chunk), b"\n\n", _DONE))
        if is_last:
            self._is_told = True
            return b"".join((piece, b": kvmosaic ", _json(self._note.report), b"\n\n"))
        return piece


def _chunk_fields(piece: bytes) -> dict[str, Any]:
    """Fields that all chunks of an answer have in common."""
    try:
        chunk = json.loads(piece.partition(b"\n")[0][len(_EVENT) :])
    except ValueError:
        return {}
    return {name: chunk[name] for name in _CHUNK_FIELDS if name in chunk}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
