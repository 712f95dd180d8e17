"""The scheduler's picture of what the workers have stored."""

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import RankReport, TiersInUse


class StoreMirror:
    """Which entries every tensor-parallel rank has, and in which tier. It may lag a step behind: it decides what to
    wait for and what to report, never what is served."""

    def __init__(self, ranks: int) -> None:
        self._tiers: list[dict[bytes, str]] = [{} for _ in range(ranks)]
        self._fastest: set[str] = set()
        self._in_use: dict[int, TiersInUse] = {}
        """By rank that was heard of."""
        self._has_failed = False

    @property
    def is_complete(self) -> bool:
        """Whether every rank has told what it has; each does so with its first step."""
        return len(self._in_use) == len(self._tiers)

    @property
    def may_lag_behind_others(self) -> bool:
        """Whether ranks look into tiers to which other engines may write."""
        return all(tiers == "all" for tiers in self._in_use.values())

    @property
    def off_reason(self) -> Fallback | None:
        """Why nothing may be reused, if so: for good, or until ranks know their weights again."""
        if self._has_failed:
            return Fallback.SELF_TEST
        return Fallback.WEIGHTS if "none" in self._in_use.values() else None

    def clear(self) -> None:
        """All ranks are about to forget everything."""
        for tiers in self._tiers:
            tiers.clear()

    def update(self, report: RankReport) -> None:
        """Take in what a rank reports."""
        self._fastest.add(report.fastest)
        self._in_use[report.rank] = report.tiers
        self._has_failed |= report.is_off
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
