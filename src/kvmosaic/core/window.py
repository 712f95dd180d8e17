"""What later tokens can still see in layers with a sliding window, and so what of them is worth storing."""

from dataclasses import dataclass


def reachable_tail(window: int, block_size: int, extra_blocks: int = 0) -> int:
    """Tokens before a boundary, in whole blocks, that tokens behind it can see in a layer where each sees ``window``
    tokens, itself among them. ``extra_blocks`` more for whoever starts that much before the boundary."""
    return (-(-(window - 1) // block_size) + extra_blocks) * block_size


def reachable_block_mask(num_tokens: int, block_size: int, tail: int, segment: int) -> list[bool]:
    """Which blocks of a sequence are worth storing for layers of which a :func:`reachable_tail` is seen, where
    sequences are only ever continued at multiples of ``segment`` tokens: the tail of each segment, and nothing beyond
    the last of them. ``segment`` and ``tail`` are multiples of ``block_size``."""
    assert segment % block_size == tail % block_size == 0
    per_segment = segment // block_size
    skipped = per_segment - tail // block_size
    return [index % per_segment >= skipped for index in range(num_tokens // segment * per_segment)]


@dataclass(frozen=True)
class WindowTails:
    """Layers of which entries keep only the last tokens: what is computed behind an entry sees no more of them. The
    default is that all layers keep everything."""

    layers: tuple[int, ...] = ()
    tokens: int = 0
    """How many each of ``layers`` keeps; all of an entry that has fewer."""

    def kept(self, layer: int, tokens: int) -> int:
        """Tokens that an entry of ``tokens`` keeps in a layer."""
        return min(tokens, self.tokens) if layer in self.layers else tokens

    def cuts(self, tokens: int) -> bool:
        """Whether an entry of ``tokens`` lacks any."""
        return bool(self.layers) and tokens > self.tokens

    def begins(self, layers: int, tokens: int) -> list[int]:
        """For each of ``layers``, and for their end, how many rows of an entry of ``tokens`` come before it."""
        begins = [0]
        for layer in range(layers):
            begins.append(begins[-1] + self.kept(layer, tokens))
        return begins

    def rows(self, layers: int, tokens: int) -> int:
        """Rows of an entry of ``tokens`` in all of ``layers``: the last of :meth:`begins`, in no time."""
        return layers * tokens - len(self.layers) * max(0, tokens - self.tokens)


WHOLE = WindowTails()
