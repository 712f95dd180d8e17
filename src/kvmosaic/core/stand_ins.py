"""Numbers that stand for the tokens of an image. All images have the same token ids; these numbers differ."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FIRST = 2**30
"""Lowest stand-in. No vocabulary has that many tokens, and numbers stay below 2**31."""
MIN_TOKENS = 8
"""Minimum number of stand-ins that identify an image. Each has 30 bits of its hash."""


def stand_ins(name: bytes, count: int) -> list[int]:
    """``count`` stand-ins for the tokens of an image. ``name``: a cryptographic hash of its content."""
    words = np.frombuffer(hashlib.shake_128(name).digest(4 * count), "<u4")
    numbers: list[int] = ((words & np.uint32(FIRST - 1)) | np.uint32(FIRST)).tolist()
    return numbers


def are_stand_ins(tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Which of ``tokens`` are stand-ins, ``[tokens]``."""
    return tokens >= FIRST


def first_stand_in(tokens: Sequence[int]) -> int:
    """Index of the first stand-in among ``tokens``; their number if there is none."""
    return next((index for index, token in enumerate(tokens) if token >= FIRST), len(tokens))


def without_stand_ins(tokens: Sequence[int]) -> list[int]:
    """The tokens that a tokenizer can read."""
    return [token for token in tokens if token < FIRST]
