"""Decides which KV of layers with a sliding window is worth storing: the part that later tokens can see."""

from dataclasses import dataclass


def reachable_tail(window: int, block_size: int, extra_blocks: int = 0) -> int:
    """Number of tokens before a boundary, in whole blocks, that tokens after it can see. Each token sees ``window``
    tokens, including itself. ``extra_blocks``: further blocks, if computation starts that far before the boundary."""
    return (-(-(window - 1) // block_size) + extra_blocks) * block_size


def reachable_block_mask(num_tokens: int, block_size: int, tail: int, segment: int) -> list[bool]:
    """Which blocks of a sequence are worth storing for layers with a sliding window: those in the last ``tail``
    tokens of each complete segment (see :func:`reachable_tail`). Sequences are only continued at multiples of
    ``segment`` tokens. ``segment`` and ``tail`` are multiples of ``block_size``."""
    assert segment % block_size == tail % block_size == 0
    per_segment = segment // block_size
    skipped = per_segment - tail // block_size
    return [index % per_segment >= skipped for index in range(num_tokens // segment * per_segment)]


@dataclass(frozen=True)
class WindowTails:
    """Layers in which entries keep only the last tokens, because tokens after an entry see no others. By default all
    layers keep all tokens."""

    layers: tuple[int, ...] = ()
    tokens: int = 0
    """Number of tokens that each of ``layers`` keeps; shorter entries are kept whole."""

    def kept(self, layer: int, tokens: int) -> int:
        """Number of tokens that an entry of ``tokens`` tokens keeps in a layer."""
        return min(tokens, self.tokens) if layer in self.layers else tokens

    def cuts(self, tokens: int) -> bool:
        """Whether an entry of ``tokens`` tokens lacks some of them in some layer."""
        return bool(self.layers) and tokens > self.tokens


WHOLE = WindowTails()
