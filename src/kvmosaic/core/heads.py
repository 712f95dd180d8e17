"""The KV heads and layers that a rank holds, and their names in keys."""

import re
from dataclasses import dataclass, replace

from kvmosaic.core.errors import ConfigError

ALL_HEADS = "all"
KEY_PART = re.compile(r"all|(\d{1,5})-(\d{1,5})of(\d{1,5})(?:L(\d{1,5})-(\d{1,5})(?:by(\d{1,5}))?)?", re.ASCII)
"""The part of a key that names heads. Five digits at most: no key in a store may stand for a billion heads."""
MOST_PARTS = 10**5
"""Maximum number of parts that a parsed key may stand for."""


@dataclass(frozen=True)
class HeadRange:
    """Consecutive KV heads in consecutive layers. Both are numbered within the whole model, independent of how an
    engine splits it. As part of a key: ``4-7of8L0-31``, or ``4-7of8L0-31by16`` if only 16 layers are stored
    together."""

    first: int
    last: int
    total: int
    first_layer: int
    last_layer: int
    together: int | None = None
    """Number of layers that are stored together, from a multiple of this number on; ``None``: all of them."""

    def __str__(self) -> str:
        cut = "" if self.together is None else f"by{self.together}"
        return f"{self.first}-{self.last}of{self.total}L{self.first_layer}-{self.last_layer}{cut}"

    @classmethod
    def parse(cls, text: str) -> "HeadRange | None":
        """Inverse of ``str(heads)``. ``None`` for any other text, as in keys of heads that are stored together."""
        found = KEY_PART.fullmatch(text)
        if found is None or found[4] is None:
            return None
        together = None if found[6] is None else int(found[6])
        first, last, total, first_layer, last_layer = map(int, found.groups()[:5])
        heads = cls(first, last, total, first_layer, last_layer, together)
        in_order = heads.first <= heads.last < heads.total and heads.first_layer <= heads.last_layer
        if not in_order or str(heads) != text:
            return None
        is_cut = together is None or (0 < together < heads.layers and heads.num_parts <= MOST_PARTS)
        return heads if is_cut else None

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def layers(self) -> int:
        return self.last_layer - self.first_layer + 1

    def cut(self, together: int | None) -> "HeadRange":
        """The same heads and layers, stored in groups of ``together`` layers. Raises :class:`ConfigError` if
        that would cut across the first layer."""
        if together is not None and self.first_layer % together:
            raise ConfigError(
                f"remote_layers={together}: a pipeline stage begins at layer {self.first_layer}, which is not "
                "a multiple of it; choose a number that divides the first layers of all stages"
            )
        # If all layers are stored together, the name does not depend on ``together``.
        together = None if together is None or together >= self.layers else together
        return replace(self, together=together)

    @property
    def num_parts(self) -> int:
        return self.count * -(-self.layers // (self.together or self.layers))

    @property
    def layer_spans(self) -> list[tuple[int, int]]:
        """First and last layer of each part that is stored together."""
        step = self.together or self.layers
        starts = range(self.first_layer, self.last_layer + 1, step)
        return [(start, min(start + step - 1, self.last_layer)) for start in starts]

    def parts(self) -> list["HeadRange"]:
        """The parts that are stored together: head by head, each with one group of layers after the other."""
        return [
            HeadRange(head, head, self.total, *span)
            for head in range(self.first, self.last + 1)
            for span in self.layer_spans
        ]


@dataclass(frozen=True)
class HeadShare:
    """The heads and layers that one rank holds. The only definition of that split."""

    heads: HeadRange
    replica: int = 0
    """Index among the ranks that hold the same heads. There are several if there are more ranks than heads."""
    replicas: int = 1

    @classmethod
    def of_rank(cls, rank: int, ranks: int, heads: int, layers: int, first_layer: int = 0) -> "HeadShare":
        """The share of a tensor-parallel rank. ``heads`` are those of the model, ``layers`` those of the rank's
        pipeline stage, whose first one is ``first_layer``. A latent that all heads share (MLA) counts as one head, on
        every rank."""
        if max(heads, ranks) % min(heads, ranks):
            raise ValueError(f"{heads} KV heads cannot be spread evenly over {ranks} ranks")
        count, replicas = max(1, heads // ranks), max(1, ranks // heads)
        first = rank // replicas * count
        own = HeadRange(first, first + count - 1, heads, first_layer, first_layer + layers - 1)
        return cls(own, rank % replicas, replicas)

    @property
    def together(self) -> str:
        """The part of a key for entries whose heads are stored together."""
        everything = self.replicas == 1 and self.heads.count == self.heads.total
        return ALL_HEADS if everything else str(self.heads).partition("L")[0]

    def cut(self, layers: int | None) -> "HeadShare":
        """The same share, stored in groups of ``layers`` layers; ``None``: all layers together."""
        return replace(self, heads=self.heads.cut(layers))

    def writes(self, content_hash: bytes) -> bool:
        """Whether this rank stores a chunk, among the ranks with the same heads. The content hash decides."""
        return int.from_bytes(content_hash[:4], "little") % self.replicas == self.replica
