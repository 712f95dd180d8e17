"""The KV heads that a tensor-parallel rank holds, and their names in keys."""

import re
from dataclasses import dataclass

ALL_HEADS = "all"
KEY_PART = re.compile(r"all|(\d{1,5})-(\d{1,5})of(\d{1,5})(?:L(\d{1,5})-(\d{1,5}))?", re.ASCII)
"""The part of a key that names heads. Five digits at most: no key in a store may stand for a billion heads."""


@dataclass(frozen=True)
class HeadRange:
    """Consecutive KV heads in consecutive layers. Both are numbered within the whole model, independent of how an
    engine splits it. As part of a key: ``4-7of8L0-31``."""

    first: int
    last: int
    total: int
    first_layer: int
    last_layer: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}of{self.total}L{self.first_layer}-{self.last_layer}"

    @classmethod
    def parse(cls, text: str) -> "HeadRange | None":
        """Inverse of ``str(heads)``. ``None`` for any other text, as in keys of heads that are stored together."""
        found = KEY_PART.fullmatch(text)
        if found is None or found[4] is None:
            return None
        heads = cls(*map(int, found.groups()))
        in_order = heads.first <= heads.last < heads.total and heads.first_layer <= heads.last_layer
        return heads if in_order and str(heads) == text else None

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def layers(self) -> int:
        return self.last_layer - self.first_layer + 1

    def each(self) -> list["HeadRange"]:
        """One range per head."""
        layers = self.first_layer, self.last_layer
        return [HeadRange(head, head, self.total, *layers) for head in range(self.first, self.last + 1)]


@dataclass(frozen=True)
class HeadShare:
    """The heads that one tensor-parallel rank holds. The only definition of that split."""

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
        last = first + count - 1, first_layer + layers - 1
        return cls(HeadRange(first, last[0], heads, first_layer, last[1]), rank % replicas, replicas)

    @property
    def together(self) -> str:
        """The part of a key for entries whose heads are stored together."""
        everything = self.replicas == 1 and self.heads.count == self.heads.total
        return ALL_HEADS if everything else str(self.heads).partition("L")[0]

    def writes(self, content_hash: bytes) -> bool:
        """Whether this rank stores a chunk, among the ranks with the same heads. The content hash decides."""
        return int.from_bytes(content_hash[:4], "little") % self.replicas == self.replica
