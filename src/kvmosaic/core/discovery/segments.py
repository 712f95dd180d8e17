"""A prompt as hashed segments, so that the cost of comparing two texts does not depend on their length."""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvmosaic.core.discovery.cuts import Cuts
from kvmosaic.core.prompt import Span

PRIME = 2**31 - 1
"""Modulus of the two hashes that are joined into one. Products fit into 64 bits."""
_MARK = 1 << 62
"""A bit that is set in every hash, so that no hash is 0."""


@dataclass(frozen=True)
class Segments:
    """A prompt's segments ``0 .. count-1``."""

    edges: list[int]
    """Start of each segment, then the prompt's length."""
    regions: list[Span]
    """For each segment, the surrounding tokens up to the nearest barriers. For a barrier, the barrier itself."""
    limits: list[int]
    """For each segment, the position where new runs of its region have to end."""
    hashes: npt.NDArray[np.uint64]
    """Hash of each segment's tokens; 0 for barriers, which are equal to nothing."""
    prefixes: npt.NDArray[np.uint64]
    """For each segment, hash of all tokens of the prompt up to the segment's end."""
    _sums: npt.NDArray[np.uint64]
    _inverses: npt.NDArray[np.uint64]
    _salt: int

    def __len__(self) -> int:
        return len(self.regions)

    def digest(self, start: int, end: int) -> int:
        """Hash of tokens ``start .. end-1``."""
        total, inverse = self._sums.item, self._inverses.item  # a hash takes a microsecond, and there are many runs
        upper = (total(0, end) - total(0, start)) * inverse(0, start) % PRIME
        lower = (total(1, end) - total(1, start)) * inverse(1, start) % PRIME
        return _MARK | (upper << 31 | lower) ^ self._salt

    @cached_property
    def hash_list(self) -> list[int]:
        """``hashes`` as a list, for access to single items."""
        hashes: list[int] = self.hashes.tolist()
        return hashes


class SegmentHasher:
    """Hashes prompts by polynomials over their tokens at two secret points, so that clients cannot construct
    collisions. Memory: 32 bytes per token of the longest prompt."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._bases = [secrets.randbelow(PRIME - 2**20) + 2**19 for _ in range(2)]
        self._powers = np.ones((2, 1), np.uint64)
        self._inverses = np.ones((2, 1), np.uint64)

    def hash(self, tokens: npt.NDArray[np.int64], cuts: Cuts, salt: str | None) -> Segments:
        """The hashed segments of a prompt. Prompts with different salts have no hashes in common."""
        while self._powers.shape[1] <= len(tokens):
            self._grow()
        prime = np.uint64(PRIME)
        totals = np.zeros((2, len(tokens) + 1), np.uint64)
        terms = totals[:, 1:]
        np.multiply(tokens.astype(np.uint64) + np.uint64(1), self._powers[:, : len(tokens)], out=terms)
        high = terms >> np.uint64(31)
        terms &= prime
        terms += high  # equal modulo the prime, and at most 32 bits
        np.cumsum(terms, axis=1, out=terms)  # 64 bits have room for four billion tokens
        sums = totals[:, cuts.edges] % prime
        inverses = self._inverses[:, cuts.edges[:-1]]
        number = self._salt(salt)
        hashes = _joined((sums[:, 1:] + prime - sums[:, :-1]) % prime * inverses % prime, number)
        hashes[cuts.is_barrier] = 0
        prefixes = _joined(sums[:, 1:], number)
        edges, regions, limits = cuts.edges.tolist(), cuts.regions(), cuts.limits.tolist()
        return Segments(edges, regions, limits, hashes, prefixes, totals, self._inverses, number)

    def _grow(self) -> None:
        """Double the number of powers."""
        size, prime = self._powers.shape[1], np.uint64(PRIME)
        grown = []
        for table, sign in ((self._powers, 1), (self._inverses, -1)):
            factors = np.array([[pow(base, sign * size, PRIME)] for base in self._bases], np.uint64)
            grown.append(np.concatenate((table, table * factors % prime), axis=1))
        self._powers, self._inverses = grown

    def _salt(self, salt: str | None) -> int:
        if salt is None:
            return 0
        text = salt.encode(errors="surrogatepass")  # JSON can contain single surrogates
        digest = hashlib.blake2b(text, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") % _MARK


def _joined(pairs: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.uint64]:
    """One hash for each pair."""
    joined: npt.NDArray[np.uint64] = (pairs[0] << np.uint64(31) | pairs[1]) ^ np.uint64(salt) | np.uint64(_MARK)
    return joined
