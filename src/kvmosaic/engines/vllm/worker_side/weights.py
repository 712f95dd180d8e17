"""Which weights this engine computes with: other weights give other KV."""

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
"""Maximum number of bytes that are sampled of each parameter."""


class EngineWeights:
    """The identity of the weights, the same on all ranks.

    It is the content of the files that they came from, if that is known, so that engines of any tensor-parallel size
    share KV. Otherwise, or if the weights in memory are no longer those from the start, it is a digest of the weights
    in memory."""

    def __init__(self, vllm_config: Any, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._may_have_changed = False
        self.problem: str | None = None
        """Why the weights in memory cannot be identified, if so."""
        self._at_start = self._loaded = self._look()
        self._files = ranks.first(self._digest_files(vllm_config) if ranks.rank == 0 else None)
        self.changes = 0
        """Number of changes. It also grows if earlier weights come back, so it is never the same before and after a
        change."""
        self.identity: object = self._identify()
        self._watch()

    @property
    def is_known(self) -> bool:
        """Whether the weights can be distinguished from others. Files say nothing once other weights may have been
        loaded."""
        return self._loaded is not None or (self._files is not None and not self.changes)

    @property
    def digest(self) -> str:
        """Digest of the weights, the same in other engines that have them."""
        return hashlib.sha256(repr(self.identity).encode()).hexdigest()

    def may_have_changed(self) -> None:
        """Have the weights checked again before the next use of KV."""
        self._may_have_changed = True

    def have_changed(self) -> bool:
        """Check the weights again if any rank has to, and return whether they have changed. Called by all ranks in
        the same step."""
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
        """Digest of the weights that all ranks have in memory; ``None`` if a rank cannot compute its own."""
        mine, problem = None, "no weights can be read from memory"
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
            where = weight_files(vllm_config.model_config, vllm_config.load_config)
            return None if where is None else weights_digest(*where)
        except Exception:
            if self._loaded is not None:
                logger.exception("could not read the weight files; weights are identified by what is in memory")
            return None

    def _watch(self) -> None:
        """Notice when the model is given weights directly, as reinforcement learning does."""
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
