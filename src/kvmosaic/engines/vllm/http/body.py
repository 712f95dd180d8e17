"""A request's JSON: only the needed fields are decoded, parameters are added, everything else stays as the client
wrote it."""

from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import Raw

PARAMETERS = "kv_transfer_params"
"""The field of a request that the engine reads."""

_OBJECT = msgspec.json.Decoder(dict[str, Raw])


class RequestBody:
    """The JSON object that a client sent. Raises ``ValueError`` or ``RecursionError`` for anything else."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent
        self._fields = _OBJECT.decode(sent)
        given = self._fields.get(PARAMETERS, Raw(b"null"))
        self._parameters = {} if bytes(given) == b"null" else _OBJECT.decode(given)

    def read(self, names: Collection[str]) -> dict[str, Any]:
        """Its fields that are in ``names``, decoded."""
        return {name: msgspec.json.decode(self._fields[name]) for name in names if name in self._fields}

    def parameter(self, name: str) -> Any:
        """A parameter that the client sent, or ``None``."""
        return msgspec.json.decode(self._parameters[name]) if name in self._parameters else None

    def documents(self) -> list[str] | None:
        """The documents that the client named; ``None`` if it sent something else under that name."""
        named = self.parameter("documents")
        if named is None:
            return []
        return named if isinstance(named, list) and all(isinstance(text, str) for text in named) else None

    def with_parameters(self, added: dict[str, Any]) -> bytes:
        """The same body with ``added`` among its parameters. Values that the client wrote keep their bytes; so does
        the whole body, if the client sent no parameters."""
        if PARAMETERS in self._fields:
            return msgspec.json.encode(self._fields | {PARAMETERS: self._parameters | added})
        start = self._sent.index(b"{") + 1
        field = msgspec.json.encode({PARAMETERS: added})[1:-1]
        return b"".join((self._sent[:start], field, b"," if self._fields else b"", self._sent[start:]))
