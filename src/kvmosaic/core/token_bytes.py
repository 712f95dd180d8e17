"""The bytes each token stands for, so that text can be searched for inside token ids."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that parsing needs."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return alphabet


class TokenBytes:
    """Maps a token id to its bytes *inside* a text (a leading space is kept), remembering each answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        self._added = {int(i) for i in getattr(tokenizer, "added_tokens_decoder", {})}
        # Decoders strip the space that starts a text; after an anchor token they keep it.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._bytes_of(token_id)
        return piece

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < 2**31 else None
        if token is None:  # an id beyond the vocabulary (padded embedding rows) stands for no text
            return b""
        if token_id in self._added:
            return token.encode()
        if self._alphabet is not None and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return self._decode([*self._anchor, token_id])[len(self._anchor_text) :].encode()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", None))
