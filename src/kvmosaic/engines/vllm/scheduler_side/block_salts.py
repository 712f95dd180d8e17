"""Block hashes that are a request's own."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvmosaic.engines.vllm.compat.scheduling import HIDDEN, block_hasher, set_block_hasher


class BlockSalt(NamedTuple):
    """What is mixed into the hashes of blocks ``first .. end-1``, or of all from ``first`` on."""

    digest: bytes
    """32 bytes of a cryptographic hash."""
    first: int
    end: int | None
    is_hidden: bool = True
    """Whether vLLM's events leave these blocks out."""


def weights_salt(changes: int, digest: str) -> BlockSalt:
    """For all blocks of requests that came after weights changed. The digest of the weights, because others see the
    hashes in events. How often they changed, because requests that there were at a change leave KV of both in vLLM's
    prefix cache: it must not be found when the old ones come back."""
    return BlockSalt(hashlib.sha256(f"weights {changes} {digest}".encode()).digest(), 0, None, is_hidden=False)


class BlockSalts:
    """Gives a request hashes of its own for some of its blocks.

    KV that is not what vLLM would have computed must never be found by a request that it was not made for; the same
    request asked again may find it. A plain hash covers all tokens up to its block, so salting each is enough and
    costs no second hashing. Hidden ones end in a mark, by which they are kept out of vLLM's events."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._original = block_hasher(request)
        self.plain = list(request.block_hashes)
        """The hashes without salts."""
        self._salts: list[BlockSalt] = []
        if self._original is not None:  # else nothing is ever hashed
            set_block_hasher(request, self._hash)

    def add(self, salts: Sequence[BlockSalt]) -> None:
        """Salt blocks, also those not full yet. Never the same salt twice: that would undo it."""
        self._salts += salts
        hashes = self._request.block_hashes
        if salts and hashes:
            first = min(salt.first for salt in salts)
            hashes[first:] = _salted(hashes[first:], first, salts)

    def _hash(self, request: Any) -> list[Any]:
        mine = request.block_hashes
        del self.plain[len(mine) :]
        request.block_hashes = self.plain  # what the original chains its hashes to
        assert self._original is not None
        new = self._original(request)
        request.block_hashes = mine
        self.plain.extend(new)
        return _salted(new, len(mine), self._salts)


def _salted(hashes: list[Any], block: int, salts: Sequence[BlockSalt]) -> list[Any]:
    """What stands in for ``hashes`` of the blocks from ``block`` on: as hard to meet by chance."""
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
    joined = mixed.tobytes()  # a prompt may have thousands
    return [joined[at : at + size] for at in range(0, len(joined), size)]
