"""The bytes that each token stands for, so that text can be found in token ids."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np

MAX_TOKEN_ID = 2**20
"""Exclusive upper limit of token ids. Ids beyond it stand for no text; no vocabulary is that large."""

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

    def token_at(self, offset: int) -> int | None:
        """The first token that begins at byte ``offset``; ``None`` if none does."""
        starts = self.starts.data  # bisecting it is faster than numpy for a single number
        index = bisect_left(starts, offset)
        return index if index < len(starts) and starts[index] == offset else None


class PromptTexts:
    """Creates the :class:`PromptText` of prompts. The bytes of all known tokens are in one array, so that 10,000
    tokens take a fraction of a millisecond."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces
        self._starts = np.zeros(0, dtype=np.int32)
        self._lengths = np.zeros(0, dtype=np.int32)
        """Length of each token in bytes; -1 if it is not known yet."""
        self._all = np.zeros(0, dtype=np.uint8)
        self._used = 0
        self._lock = Lock()
        """Guards the arrays: reading a prompt adds its tokens, and servers read several prompts concurrently."""

    def of(self, ids: np.ndarray) -> PromptText:
        """``ids``: token ids, ``[tokens]`` int64."""
        with self._lock:
            return self._of(ids)

    def _of(self, ids: np.ndarray) -> PromptText:
        if not len(ids):
            return PromptText(b"", np.zeros(1, dtype=np.int64))
        if ids.min() < 0 or ids.max() >= MAX_TOKEN_ID:
            ids = np.where((ids < 0) | (ids >= MAX_TOKEN_ID), MAX_TOKEN_ID, ids)  # these stand for no text
        missing = int(ids.max()) + 1 - len(self._lengths)
        if missing > 0:
            self._starts = np.concatenate([self._starts, np.zeros(missing, dtype=np.int32)])
            self._lengths = np.concatenate([self._lengths, np.full(missing, -1, dtype=np.int32)])
        lengths = self._lengths.take(ids)
        if lengths.min() < 0:
            self._learn(np.unique(ids[lengths < 0]).tolist())
            lengths = self._lengths.take(ids)
        starts = np.zeros(len(ids) + 1, dtype=np.int64)
        lengths.cumsum(out=starts[1:])
        places = np.repeat(self._starts.take(ids) - starts[:-1].astype(np.int32), lengths)
        places += np.arange(len(places), dtype=np.int32)
        return PromptText(self._all.take(places, mode="clip").tobytes(), starts)  # ``take`` is faster than indexing

    def _learn(self, tokens: list[int]) -> None:
        pieces = [self._pieces[token] for token in tokens]
        added = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        while self._used + len(added) > len(self._all):
            self._all = np.concatenate([self._all, np.zeros(max(2**16, len(self._all)), dtype=np.uint8)])
        for token, piece in zip(tokens, pieces, strict=True):
            self._starts[token], self._lengths[token] = self._used, len(piece)
            self._all[self._used : self._used + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            self._used += len(piece)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", None))
