"""Salted block hashes of requests."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvmosaic.engines.vllm.compat.scheduling import HIDDEN, block_hasher, set_block_hasher


class BlockSalt(NamedTuple):
    """A salt for the hashes of blocks ``first .. end-1``, or of all from ``first`` on."""

    digest: bytes
    """32 bytes of a cryptographic hash."""
    first: int
    end: int | None
    is_hidden: bool = True
    """Whether vLLM's events leave these blocks out."""


def weights_salt(changes: int, digest: str) -> BlockSalt:
    """Salt for all blocks of requests that arrive after weights changed. It includes the digest of the weights,
    because others see the hashes in events. It includes the number of changes, because requests that run during a
    change leave KV of both weights in vLLM's prefix cache, which must not be found when the old weights come back."""
    return BlockSalt(hashlib.sha256(f"weights {changes} {digest}".encode()).digest(), 0, None, is_hidden=False)


def keep_to_itself(request: Any, block: int | None) -> None:
    """Have a request find only its own blocks from ``block`` on, if given. vLLM may ask again about a request that is
    served plainly, when others have loaded blocks with the same hashes. These may lack KV in layers with a sliding
    window, so only a load could continue from there, and the request gets none any more."""
    if block is not None:
        BlockSalts(request).add([BlockSalt(secrets.token_bytes(32), block, None)])


class BlockSalts:
    """Salts the hashes of some of a request's blocks.

    KV that differs from what vLLM would have computed must never be found by a request that it was not made for; a
    repetition of the same request may find it. A plain hash covers all tokens up to its block, so salting each hash
    is enough and costs no second hashing. Hidden hashes end in a mark, which keeps them out of vLLM's events."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._original = block_hasher(request)
        self.plain = list(request.block_hashes)
        """The hashes without salts."""
        self._salts: list[BlockSalt] = []
        """In the order of their first blocks."""
        if self._original is not None:  # otherwise nothing is ever hashed
            set_block_hasher(request, self._hash)

    def add(self, salts: Sequence[BlockSalt]) -> None:
        """Salt blocks, including those that are not full yet. Never add the same salt twice: that would undo it."""
        self._salts += salts
        hashes = self._request.block_hashes
        if salts and hashes:
            first = min(salt.first for salt in salts)
            hashes[first:] = _salted(hashes[first:], first, salts)

    def take_back(self, computed: int) -> bool:
        """Take all salts back, because vLLM computes every block from block ``computed`` on. Returns whether that is
        possible: a salted block before those would be the beginning of blocks that seem exact."""
        if self._salts and self._salts[0].first < computed:
            return False
        self._salts = []
        self._request.block_hashes[:] = self.plain
        return True

    def _hash(self, request: Any) -> list[Any]:
        mine = request.block_hashes
        del self.plain[len(mine) :]
        request.block_hashes = self.plain  # the original chains its hashes to these
        assert self._original is not None
        try:
            new = self._original(request)
        finally:  # without its salts, others would find its blocks
            request.block_hashes = mine
        self.plain.extend(new)
        return _salted(new, len(mine), self._salts)


def _salted(hashes: list[Any], block: int, salts: Sequence[BlockSalt]) -> list[Any]:
    """Salted ``hashes`` of the blocks from ``block`` on, for which collisions are as unlikely."""
    if not hashes:
        return []
    size = len(hashes[0])
    mixed = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), size).copy()
    for digest, first, end, is_hidden in salts:
        if end is None or end > block:
            rows = slice(max(0, first - block), None if end is None else end - block)
            mixed[rows] ^= np.frombuffer(digest, np.uint8)[-size:]
            if is_hidden:
                mixed[rows, -len(HIDDEN) :] = np.frombuffer(HIDDEN, np.uint8)
    joined = mixed.tobytes()  # a prompt may have thousands of hashes
    return [joined[at : at + size] for at in range(0, len(joined), size)]
