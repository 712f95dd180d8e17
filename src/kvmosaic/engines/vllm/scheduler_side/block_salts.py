"""Block hashes that are a request's own."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmosaic.engines.vllm.compat.scheduling import block_hasher, set_block_hasher


class BlockSalts:
    """Gives a request hashes of its own for some of its blocks.

    KV that is not what vLLM would have computed must never be found by a request that it was not made for; the same
    request asked again may find it. A plain hash covers all tokens up to its block, so salting each is enough and
    costs no second hashing."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._original = block_hasher(request)
        self.plain = list(request.block_hashes)
        """The hashes without salts."""
        self._salts: list[tuple[int, int | None, NDArray[np.uint8]]] = []
        """First block, end, and what is mixed into the hashes between them."""
        if self._original is not None:  # else nothing is ever hashed
            set_block_hasher(request, self._hash)

    def add(self, salt: bytes, first: int, end: int | None = None) -> None:
        """Salt the hashes of blocks ``first .. end-1``, or of all from ``first`` on, also those not full yet.
        Never the same salt twice: that would undo it."""
        self._salts.append((first, end, np.frombuffer(hashlib.sha256(salt).digest(), np.uint8)))
        hashes = self._request.block_hashes
        hashes[first:end] = self._salted(self.plain[: len(hashes)][first:end], first)

    def _hash(self, request: Any) -> list[Any]:
        mine = request.block_hashes
        del self.plain[len(mine) :]
        request.block_hashes = self.plain  # what the original chains its hashes to
        assert self._original is not None
        new = self._original(request)
        request.block_hashes = mine
        self.plain.extend(new)
        return self._salted(new, len(mine))

    def _salted(self, hashes: list[Any], block: int) -> list[Any]:
        """What stands in for ``hashes`` of the blocks from ``block`` on: as hard to meet by chance."""
        if not hashes:
            return []
        size = len(hashes[0])
        mixed = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), size).copy()
        for first, end, salt in self._salts:
            mixed[max(0, first - block) : None if end is None else max(0, end - block)] ^= salt[-size:]
        joined = mixed.tobytes()  # a prompt may have thousands
        return [joined[at : at + size] for at in range(0, len(joined), size)]
