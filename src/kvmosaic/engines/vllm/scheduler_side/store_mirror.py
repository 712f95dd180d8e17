"""The scheduler's picture of what the workers have stored."""

from kvmosaic.engines.vllm.messages import RankReport


class StoreMirror:
    """Which entries every tensor-parallel rank has, and in which tier. It may lag a step behind: it decides what to
    wait for and what to report, never what is served."""

    def __init__(self, ranks: int) -> None:
        self._tiers: list[dict[bytes, str]] = [{} for _ in range(ranks)]
        self._fastest: set[str] = set()
        self._heard_of: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has told what it has; each does so with its first step."""
        return len(self._heard_of) == len(self._tiers)

    def clear(self) -> None:
        """All ranks are about to forget everything."""
        for tiers in self._tiers:
            tiers.clear()

    def update(self, report: RankReport) -> None:
        """Take in what a rank reports."""
        self._fastest.add(report.fastest)
        self._heard_of.add(report.rank)
        tiers = self._tiers[report.rank]
        if report.is_all:
            tiers.clear()
        for digest, tier in report.changes.items():
            if tier is None:
                tiers.pop(digest, None)
            else:
                tiers[digest] = tier

    def has(self, digest: bytes) -> bool:
        """Whether every rank has an entry."""
        return self.tier(digest) is not None

    def is_near(self, digest: bytes) -> bool:
        """Whether every rank has an entry in its fastest tier, so that nothing has to be fetched."""
        tier = self.tier(digest)
        return tier is not None and tier in self._fastest

    def tier(self, digest: bytes) -> str | None:
        """Where an entry is: ``None`` when some rank lacks it, a slower tier if it is there on some rank."""
        found = {tiers.get(digest) for tiers in self._tiers}
        if None in found:
            return None
        slower = found - self._fastest
        return (slower or found).pop()
