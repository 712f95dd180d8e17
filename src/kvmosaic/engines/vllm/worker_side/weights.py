"""Which weights this engine computes with: KV of other ones is other KV."""

import logging
import uuid
from functools import wraps
from typing import Any

import xxhash

from kvmosaic.engines.loaded_weights import sampled_digest
from kvmosaic.engines.vllm.compat.weights import loaded_tensors, weight_files
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.models.digest import weights_digest

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 64 * 1024
"""Maximum bytes of each parameter that are looked at."""


class EngineWeights:
    """The identity of the weights, the same on all ranks.

    It is the content of the files they came from, while that is known: so engines of any tensor-parallel size share
    KV. When something else is in memory than at the start, it is a digest of that."""

    def __init__(self, vllm_config: Any, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._may_have_changed = False
        self._at_start = self._loaded = self._look()
        self._files = ranks.first(_files(vllm_config) if ranks.rank == 0 else None)
        self.changes = 0
        """How often they became other ones. Never the same number for weights before and after a change, also if
        those before it come back."""
        self.identity: object = self._identify()
        self._watch()

    @property
    def is_known(self) -> bool:
        """Whether they can be told from others."""
        return self._files is not None or self._loaded is not None

    def may_have_changed(self) -> None:
        """Look again before the next use of KV."""
        self._may_have_changed = True

    def have_changed(self) -> bool:
        """Look again if need be, on any rank; called by all of them in the same step. Whether they are others now."""
        if self._ranks.all_have([not self._may_have_changed])[0]:
            return False
        self._may_have_changed = False
        before, self._loaded = self._loaded, self._look()
        if self._loaded is not None and self._loaded == before:
            return False
        self.changes += 1
        self.identity = self._identify()
        return True

    def _identify(self) -> object:
        if self._loaded is None and self.changes:
            return "unknown", self._ranks.first(uuid.uuid4().hex)
        if self._files is not None and self._loaded == self._at_start:
            return self._files
        return "loaded", self._loaded

    def _look(self) -> str | None:
        """A digest of what all ranks have in memory; ``None`` if one of them cannot tell."""
        try:
            mine = sampled_digest(loaded_tensors(self._model), SAMPLE_BYTES)
        except Exception:
            logger.exception("could not look at the weights")
            mine = None
        every = self._ranks.gather(mine)
        return None if None in every else xxhash.xxh3_128_hexdigest(repr(every).encode())

    def _watch(self) -> None:
        """Notice when somebody hands the model weights directly, as reinforcement learning does."""
        load = getattr(self._model, "load_weights", None)
        if load is None:
            return

        @wraps(load)
        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            finally:
                self.may_have_changed()

        self._model.load_weights = noting


def _files(vllm_config: Any) -> list[tuple[str, int, str]] | None:
    try:
        where = weight_files(vllm_config)
        return None if where is None else weights_digest(*where)
    except Exception:
        logger.exception("could not read the files of weights; they are known by what was loaded instead")
        return None
