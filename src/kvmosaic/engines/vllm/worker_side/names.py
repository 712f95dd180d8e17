"""What entries are named after besides their content, and where such names mean something."""

import logging
from collections.abc import Mapping

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.key import format_fingerprint
from kvmosaic.engines.vllm.messages import TiersInUse
from kvmosaic.engines.vllm.worker_side.weights import EngineWeights

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

UNKNOWN = "nobody can tell which weights this model has (%s): %s"


class EntryNames:
    """Names that depend on the weights. If nobody can tell those from others, names last no longer than the process:
    tiers that do are left alone."""

    def __init__(
        self, config: ChunkCacheConfig, weights: EngineWeights, made_by: Mapping[str, object], *, is_first: bool
    ) -> None:
        """``made_by``: what else entries depend on; ``is_first``: whether this rank speaks for all."""
        self._weights = weights
        self._is_first = is_first
        self._made_by = made_by
        self.config = config
        """The settings, less tiers of which nothing can be known from the start."""
        has_lasting = config.disk_path is not None or config.remote is not None
        self._without_lasting: TiersInUse = "none" if has_lasting else "all"
        """Tiers to use while weights are unknown. Those that are open cannot be left out one by one."""
        if has_lasting and not weights.is_known:
            self.config = config.model_copy(update={"disk_path": None, "remote": None})
            self._without_lasting = "memory"
            self._complain("disk and remote tiers are not used")
        self.tiers: TiersInUse = "all"
        self.fingerprint: str | None = None
        """``None`` while entries have no names."""
        self._name()

    def have_changed(self) -> bool:
        """Look at the weights again if need be; called by all ranks in the same step. Whether names are others
        now."""
        if not self._weights.have_changed():
            return False
        was_open = self.tiers != "none"
        self._name()
        if self.tiers != "none":
            logger.info("weights have changed; chunks of the new ones are kept apart from those before")
        elif was_open:
            self._complain("nothing is reused until that is known")
        return True

    def _name(self) -> None:
        is_memory_alone = self._without_lasting == "memory"
        self.tiers = self._without_lasting if is_memory_alone or not self._weights.is_known else "all"
        is_named = self.tiers != "none"
        self.fingerprint = format_fingerprint(weights=self._weights.identity, **self._made_by) if is_named else None

    def _complain(self, what: str) -> None:
        if self._is_first:
            logger.error(UNKNOWN, self._weights.problem, what)
