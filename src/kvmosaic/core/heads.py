"""Which KV heads of a model a tensor-parallel rank holds, and how keys say so."""

import re
from dataclasses import dataclass

ALL_HEADS = "all"
KEY_PART = re.compile(r"all|(\d{1,5})-(\d{1,5})of(\d{1,5})(?:L(\d{1,5})-(\d{1,5}))?", re.ASCII)
"""What a key may say about heads. A name in somebody's store must not stand for a billion of them."""


@dataclass(frozen=True)
class HeadRange:
    """Consecutive KV heads in consecutive layers, both counted in the whole model: nothing here depends on how an
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
        """Inverse of ``str(heads)``; ``None`` for any other part of a key, whose heads are stored together."""
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
        """Its heads one by one."""
        layers = self.first_layer, self.last_layer
        return [HeadRange(head, head, self.total, *layers) for head in range(self.first, self.last + 1)]


@dataclass(frozen=True)
class HeadShare:
    """What one tensor-parallel rank holds: the one place that says so."""

    heads: HeadRange
    replica: int = 0
    """Its number among the ranks that hold the same heads, which are several when there are more ranks than heads."""
    replicas: int = 1

    @classmethod
    def of_rank(cls, rank: int, ranks: int, heads: int, layers: int) -> "HeadShare":
        """``heads`` and ``layers`` are the model's. A latent that heads share (MLA) is one head, on every rank."""
        if max(heads, ranks) % min(heads, ranks):
            raise ValueError(f"{heads} KV heads cannot be spread evenly over {ranks} ranks")
        count, replicas = max(1, heads // ranks), max(1, ranks // heads)
        first = rank // replicas * count
        return cls(HeadRange(first, first + count - 1, heads, 0, layers - 1), rank % replicas, replicas)

    @property
    def together(self) -> str:
        """As part of the keys of entries whose heads are stored together."""
        everything = self.replicas == 1 and self.heads.count == self.heads.total
        return ALL_HEADS if everything else str(self.heads).partition("L")[0]

    def writes(self, content_hash: bytes) -> bool:
        """Whether it is this rank, of all with the same heads, that stores a chunk. They take turns by content."""
        return int.from_bytes(content_hash[:4], "little") % self.replicas == self.replica
