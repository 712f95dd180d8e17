"""Separators that cannot be guessed, so that foreign text cannot split a prompt with one."""

import math
import secrets
from typing import Any

from kvmosaic.core.token_bytes import TokenBytes

BITS = 64
"""Minimum number of random bits in a separator."""
ENOUGH_WORDS = 1000
"""Minimum number of usable words in a vocabulary. With fewer words, hexadecimal digits are used."""
END = " # "
"""End of a separator. Its last character is a space, so that text after it begins as after any word."""


def random_separator(tokenizer: Any = None) -> str:
    """A new separator. If ``tokenizer`` is given, it has few tokens for that model."""
    words = [] if tokenizer is None else _words(tokenizer)
    if len(words) < ENOUGH_WORDS:
        return f" #{secrets.token_hex(BITS // 8)}{END}"
    count = math.ceil(BITS / math.log2(len(words)))
    return "".join(secrets.choice(words) for _ in range(count)) + END


def _words(tokenizer: Any) -> list[str]:
    """Words that are single tokens: a space and three to seven lowercase letters."""
    pieces = TokenBytes(tokenizer)
    texts = {pieces[token].decode(errors="replace") for token in range(len(tokenizer))}
    return sorted(
        text for text in texts if 4 <= len(text) <= 8 and text[0] == " " and text[1:].isascii() and text[1:].islower()
        and text[1:].isalpha()
    )  # fmt: skip
