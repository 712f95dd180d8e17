"""Clears entries: from the index and from memory at once, from slow tiers as soon as they can be changed."""

import logging
import threading
import time

from kvmosaic.store.base import TIER_ERRORS, TierDownError
from kvmosaic.store.due_clears import Matching, OneOf
from kvmosaic.store.known_tiers import KnownTiers
from kvmosaic.store.unreadable import ERROR_SECONDS
from kvmosaic.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)


class Clearing:
    """A clear never waits for a slow tier, because engines call it inside a step. Cleared entries count as absent at
    once. The writer's thread lists and deletes them, after its current write and before entries that are queued
    later. If a tier is down, it does so once the tier is back."""

    def __init__(self, known: KnownTiers, writer: BackgroundWriter) -> None:
        self._known = known
        self._writer = writer
        self._retry_at: dict[int, float] = {}
        """Time of the next attempt after a failure, by level."""

    def clear(self, matching: Matching) -> None:
        """Remove the entries whose key is ``matching`` from every tier, whether or not this process knows them."""
        known, written = self._known, range(1, len(self._known.tiers))
        with known.lock:
            known.due.add(written, matching)
            known.changes += 1
            self._writer.discard(matching)
            held = {key: tuple(record.nbytes) for key, record in known.index if matching(key)}
            for tier in known.tiers:
                cleared = [key for key, names in held.items() if tier.name in names]
                for key in cleared:
                    known.drop(tier, key)
                if not tier.is_slow:
                    known.delete(tier, cleared)
            known.forget_troubles(matching)
        if written:
            self._writer.request_tidying()

    def carry_out(self) -> None:
        """Delete cleared entries from all tiers that are up. Runs in the writer's thread."""
        for level, tier in enumerate(self._known.tiers):
            if self._known.due.at(level) and tier.is_up and time.monotonic() >= self._retry_at.get(level, 0.0):
                self._delete_at(level)

    def _delete_at(self, level: int) -> None:
        known, tier, due = self._known, self._known.tiers[level], self._known.due.at(level)
        try:
            named = {key for matching in due if isinstance(matching, OneOf) for key in matching.keys}
            others = [matching for matching in due if not isinstance(matching, OneOf)]
            listed = (info.key for info in tier.scan()) if others else ()
            tier.delete_all([*named, *(key for key in listed if any(matching(key) for matching in others))])
        except TierDownError:  # the writer is notified when the tier is back
            return
        except TIER_ERRORS as error:
            known.complain(tier, "delete cleared entries", error)
            self._retry_at[level] = time.monotonic() + ERROR_SECONDS
            retry = threading.Timer(ERROR_SECONDS, self._writer.request_tidying)
            retry.daemon = True
            retry.start()
            return
        known.worked(tier, "delete cleared entries")
        with known.lock:
            known.changes += 1
            known.due.carried_out(level, due)

    def give_up(self) -> None:
        """At shutdown: log which tiers may keep cleared entries, and forget these clears."""
        for level, tier in enumerate(self._known.tiers):
            if due := self._known.due.at(level):
                logger.warning(
                    "the %s tier cannot be used and may still have entries that were cleared; "
                    "clear it again when it can be used",
                    tier.name,
                )
                self._known.due.carried_out(level, due)
