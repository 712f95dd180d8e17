"""The bytes that each token stands for, so that text can be found in token ids."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np

MAX_TOKEN_ID = 2**20
"""Exclusive upper limit of token ids. Ids beyond it stand for no text; no vocabulary is that large."""

_FIRST = np.dtype("V16")
"""The first bytes of a token. Few tokens have more; these are written one by one."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that parsing needs."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE vocabularies use for the 256 bytes."""
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
    """Maps token ids to their bytes *inside* a text (a leading space is kept). Results are cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        self._added = {int(i) for i in getattr(tokenizer, "added_tokens_decoder", {})}
        # Decoders strip a space at the start of a text, but keep it after an anchor token.
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


@dataclass(frozen=True)
class PromptText:
    """The bytes that a prompt's tokens stand for."""

    bytes: bytes
    starts: np.ndarray
    """Byte offset of each token, then the end of the last token: ``[tokens + 1]`` int64."""


class PromptTexts:
    """Creates the :class:`PromptText` of prompts. The first bytes of all known tokens are in one array, so that
    10,000 tokens take a fraction of a millisecond."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces
        self._lengths = np.zeros(0, dtype=np.int64)
        """Length of each token in bytes; -1 if it is not known yet."""
        self._firsts = np.zeros(0, dtype=_FIRST)
        """The first bytes of each token, with zeros behind short ones."""
        self._lock = Lock()
        """Guards the arrays: reading a prompt adds its tokens, and servers read several prompts concurrently."""

    def of(self, ids: np.ndarray) -> PromptText:
        """``ids``: token ids, ``[tokens]`` int64."""
        with self._lock:
            return self._of(ids)

    def _of(self, ids: np.ndarray) -> PromptText:
        if not len(ids):
            return PromptText(b"", np.zeros(1, dtype=np.int64))
        most = int(ids.view(np.uint64).max())  # a negative id is a large number here
        if most >= MAX_TOKEN_ID:
            ids = np.where((ids < 0) | (ids >= MAX_TOKEN_ID), MAX_TOKEN_ID, ids)  # these stand for no text
            most = MAX_TOKEN_ID
        missing = most + 1 - len(self._lengths)
        if missing > 0:
            self._lengths = np.concatenate([self._lengths, np.full(missing, -1, dtype=np.int64)])
            self._firsts = np.concatenate([self._firsts, np.zeros(missing, dtype=_FIRST)])
        lengths = self._lengths.take(ids)
        if lengths.min() < 0:
            self._learn(np.unique(ids[lengths < 0]).tolist())
            lengths = self._lengths.take(ids)
        starts = np.zeros(len(ids) + 1, dtype=np.int64)
        lengths.cumsum(out=starts[1:])
        size = int(starts[-1])
        text = bytearray(size + _FIRST.itemsize)
        # Each token is written with the zeros behind it, in order, and the next token overwrites these.
        np.ndarray((size + 1,), _FIRST, text, strides=(1,))[starts[:-1]] = self._firsts.take(ids)
        long = np.flatnonzero(lengths > _FIRST.itemsize)
        for token, start in zip(ids[long].tolist(), starts[long].tolist(), strict=True):
            piece = self._pieces[token]
            text[start : start + len(piece)] = piece
        return PromptText(bytes(memoryview(text)[:size]), starts)

    def _learn(self, tokens: list[int]) -> None:
        pieces = [self._pieces[token] for token in tokens]
        self._lengths[tokens] = [len(piece) for piece in pieces]
        self._firsts[tokens] = np.array(pieces, dtype=f"S{_FIRST.itemsize}").view(_FIRST)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", None))
