"""The part of entries' names that does not depend on their content, and the tiers in which these names are valid."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.key import format_fingerprint
from kvmosaic.engines.identity import config_identity
from kvmosaic.engines.rotary import LayerRotary
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.messages import TiersInUse
from kvmosaic.engines.vllm.worker_side.weights import EngineWeights

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

UNKNOWN = "the weights of this model cannot be identified (%s): %s"


def identity(model: Any, ranks: Ranks, rotary: Sequence[LayerRotary | None], kv: KVLayers) -> dict[str, object]:
    """Everything but weights and settings that entries depend on. ``model`` is vLLM's ``ModelConfig``."""
    found: dict[str, object] = {
        "columns": ranks.of_all_layers([layer.columns if layer else None for layer in rotary]),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "revision": model.revision,
        "config": config_identity(model.hf_text_config.to_dict()),
    }
    if kv.is_quantised:
        # Tokens that attended to rounded K and V have other KV. Names of earlier releases say nothing of rounding.
        found["kv_cache"] = ranks.of_all_layers([layer.quantised for layer in kv.layers])
    return found


class EntryNames:
    """Names that depend on the weights. If the weights cannot be identified, names are valid only in this process,
    and tiers that outlive it are not used."""

    def __init__(
        self, config: ChunkCacheConfig, weights: EngineWeights, made_by: Mapping[str, object], *, is_first: bool
    ) -> None:
        """``made_by``: everything else that entries depend on; ``is_first``: whether this rank logs for all."""
        self._weights = weights
        self._is_first = is_first
        self._made_by = made_by
        self.config = config
        """The settings, without disk and remote tiers if the weights are unknown at the start."""
        has_lasting = config.disk_path is not None or config.remote is not None
        self._without_lasting: TiersInUse = "none" if has_lasting else "all"
        """Tiers to use while weights are unknown. Tiers that are open cannot be left out one by one."""
        if has_lasting and not weights.is_known:
            self.config = config.model_copy(update={"disk_path": None, "remote": None})
            self._without_lasting = "memory"
            self._complain("disk and remote tiers are not used")
        self.tiers: TiersInUse = "all"
        self.fingerprint: str | None = None
        """Fingerprint in the names; ``None`` while entries have no names."""
        self._name()

    def have_changed(self) -> bool:
        """Check the weights again if necessary, and return whether names have changed. Called by all ranks in the
        same step."""
        if not self._weights.have_changed():
            return False
        was_open = self.tiers != "none"
        self._name()
        if self.tiers != "none":
            logger.info("weights have changed; chunks of the old weights are not reused with the new ones")
        elif was_open:
            self._complain("nothing is reused until they can be")
        return True

    def _name(self) -> None:
        is_memory_alone = self._without_lasting == "memory"
        self.tiers = self._without_lasting if is_memory_alone or not self._weights.is_known else "all"
        is_named = self.tiers != "none"
        self.fingerprint = format_fingerprint(weights=self._weights.identity, **self._made_by) if is_named else None

    def _complain(self, what: str) -> None:
        if self._is_first:
            logger.error(UNKNOWN, self._weights.problem, what)
