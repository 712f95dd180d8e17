"""Separators that nobody can guess: text from elsewhere cannot cut a prompt with one."""

import math
import secrets
from typing import Any

from kvmosaic.core.token_bytes import TokenBytes

BITS = 64
"""Minimum random bits of a separator."""
ENOUGH_WORDS = 1000
"""Minimum words in a vocabulary to draw from; with fewer, hexadecimal digits do."""
END = " # "
"""What a separator ends in: a text behind it begins with a space, as behind any word."""


def random_separator(tokenizer: Any = None) -> str:
    """A new separator; of few tokens for a model whose ``tokenizer`` is given."""
    words = [] if tokenizer is None else _words(tokenizer)
    if len(words) < ENOUGH_WORDS:
        return f" #{secrets.token_hex(BITS // 8)}{END}"
    count = math.ceil(BITS / math.log2(len(words)))
    return "".join(secrets.choice(words) for _ in range(count)) + END


def _words(tokenizer: Any) -> list[str]:
    """What single tokens stand for: a space and some small letters."""
    pieces = TokenBytes(tokenizer)
    texts = {pieces[token].decode(errors="replace") for token in range(len(tokenizer))}
    return sorted(
        text for text in texts if 4 <= len(text) <= 8 and text[0] == " " and text[1:].isascii() and text[1:].islower()
        and text[1:].isalpha()
    )  # fmt: skip
