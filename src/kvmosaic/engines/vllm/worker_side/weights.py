"""Which weights this engine computes with: KV of other ones is other KV."""

import hashlib
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
        self.problem: str | None = None
        """Why nobody can tell what is in memory, if so."""
        self._at_start = self._loaded = self._look()
        self._files = ranks.first(self._digest_files(vllm_config) if ranks.rank == 0 else None)
        self.changes = 0
        """How often they became other ones. Never the same number for weights before and after a change, also if
        those before it come back."""
        self.identity: object = self._identify()
        self._watch()

    @property
    def is_known(self) -> bool:
        """Whether they can be told from others. Files say nothing once something else may have been loaded."""
        return self._loaded is not None or (self._files is not None and not self.changes)

    @property
    def digest(self) -> str:
        """What other engines with these weights call them, too."""
        return hashlib.sha256(repr(self.identity).encode()).hexdigest()

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
        if not self.is_known:
            return "unknown", self._ranks.first(uuid.uuid4().hex)
        if self._files is not None and self._loaded == self._at_start:
            return self._files
        return "loaded", self._loaded

    def _look(self) -> str | None:
        """A digest of what all ranks have in memory; ``None`` if one of them cannot tell."""
        mine, problem = None, "there is nothing to look at"
        try:
            mine = sampled_digest(loaded_tensors(self._model), SAMPLE_BYTES)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        every = self._ranks.gather((mine, problem))
        self.problem = next((why for digest, why in every if digest is None), None)
        if self.problem is not None:
            return None
        return xxhash.xxh3_128_hexdigest(repr([digest for digest, _ in every]).encode())

    def _digest_files(self, vllm_config: Any) -> list[tuple[str, int, str]] | None:
        try:
            where = weight_files(vllm_config)
            return None if where is None else weights_digest(*where)
        except Exception:
            if self._loaded is not None:
                logger.exception("could not read the files of weights; they are known by what was loaded instead")
            return None

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
