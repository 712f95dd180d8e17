"""The scheduler's view of the entries that the workers have stored."""

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import RankReport, TiersInUse


class StoreMirror:
    """Which entries every rank has, and in which tier. It may lag a step behind, so it decides what
    to wait for and what to report, never what is served."""

    def __init__(self, ranks: int, *, has_remote: bool = False, has_disk: bool = False) -> None:
        """``has_remote``, ``has_disk``: whether there is a tier in which other engines may store entries."""
        self._has_remote = has_remote
        self._has_disk = has_disk
        self._has_company = False
        self.cannot_narrow = False
        """Whether sets of tokens cannot shrink from layer to layer in this model."""
        self._tiers: list[dict[bytes, str]] = [{} for _ in range(ranks)]
        self._fastest: set[str] = set()
        self._in_use: dict[int, TiersInUse] = {}
        """Tiers in use, by rank that has reported."""
        self._has_failed = False
        self._outdated: set[int] = set()
        """Ranks that have to list their entries again."""
        self._max_tokens: dict[int, int | None] = {}
        """Tokens of the longest chunk that can be stored, by rank that has reported."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has listed its entries; each does so with its first step, and after a :meth:`clear`."""
        return len(self._in_use) == len(self._tiers) and not self._outdated

    def may_lag_behind_others(self, *, is_alone: bool) -> bool:
        """Whether to ask slower tiers for entries that are not known, because other engines may have stored them.
        ``is_alone``: no other request is running. Asking takes a step of the engine. In a quiet engine a step takes
        milliseconds, and in a busy one it may be a whole prefill step of others. So a busy engine asks a disk only if
        another process was seen to write to it."""
        if any(tiers != "all" for tiers in self._in_use.values()):
            return False
        return self._has_remote or (self._has_disk and (is_alone or self._has_company))

    @property
    def off_reason(self) -> Fallback | None:
        """Why nothing may be reused, if so: permanently, or until ranks can identify their weights again."""
        if self._has_failed:
            return Fallback.SELF_TEST
        return Fallback.WEIGHTS if "none" in self._in_use.values() else None

    def clear(self) -> None:
        """Forget all entries, until all ranks have listed theirs again."""
        for tiers in self._tiers:
            tiers.clear()
        self._outdated = set(range(len(self._tiers)))

    def update(self, report: RankReport) -> None:
        """Process a rank's report."""
        self._fastest.add(report.fastest)
        self._in_use[report.rank] = report.tiers
        self._has_failed |= report.is_off
        self._has_company |= report.has_company
        self.cannot_narrow |= report.cannot_narrow
        self._max_tokens[report.rank] = report.max_stored_tokens
        tiers = self._tiers[report.rank]
        if report.is_all:
            tiers.clear()
            self._outdated.discard(report.rank)
        for digest, tier in report.changes.items():
            if tier is None:
                tiers.pop(digest, None)
            else:
                tiers[digest] = tier

    def has(self, digest: bytes) -> bool:
        """Whether every rank has an entry."""
        return self.tier(digest) is not None

    def can_store(self, tokens: int) -> bool:
        """Whether every rank's store has room for a chunk of ``tokens`` tokens."""
        return all(most is None or tokens <= most for most in self._max_tokens.values())

    def is_near(self, digest: bytes) -> bool:
        """Whether every rank has an entry in its fastest tier, so that nothing has to be fetched."""
        tier = self.tier(digest)
        return tier is not None and tier in self._fastest

    def tier(self, digest: bytes) -> str | None:
        """Tier of an entry: ``None`` if some rank lacks it, a slower tier if some rank has it there."""
        found = {tiers.get(digest) for tiers in self._tiers}
        if None in found:
            return None
        slower = found - self._fastest
        return (slower or found).pop()
