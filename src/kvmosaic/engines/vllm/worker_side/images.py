"""The images of requests that are loaded."""

import numpy as np

from kvmosaic.core.prompt import Span
from kvmosaic.engines.vllm.compat.images import ImageModel
from kvmosaic.engines.vllm.forward.images import SequenceImages
from kvmosaic.engines.vllm.messages import ChunkLoad, Images


class LoadImages:
    """Makes :class:`SequenceImages` of loads and of their chunks. All parts of a load share one, so that each of its
    images is encoded at most once."""

    def __init__(self, model: ImageModel | None) -> None:
        """``model``: the part of the model that reads images; ``None`` if it cannot be used."""
        self._model = model
        self._made: dict[str, SequenceImages] = {}
        """Of the loads of a step, by request."""

    def of(self, load: ChunkLoad) -> SequenceImages | None:
        """The images of a request's sequence; ``None`` if it has none before its question."""
        if load.images is None:
            return None
        made = self._made.get(load.request_id) or self.sequence(load.images)
        assert made is not None
        self._made[load.request_id] = made
        return made

    def forget(self) -> None:
        """Let go of all loads, and of their embeddings."""
        self._made.clear()

    def sequence(self, images: Images | None, behind: int = 0) -> SequenceImages | None:
        """The images of a sequence of ``behind`` tokens of text and then those of ``images``."""
        if images is None:
            return None
        assert self._model is not None, "the scheduler knows whether images can be read"
        return SequenceImages(self._model, images, behind)

    def lag(self, load: ChunkLoad, span: Span) -> int | None:
        """Number by which the rotary positions of a chunk are lower than its indices; ``None`` if its tokens are not
        as far apart as in a chunk that is computed alone."""
        images = self.of(load)
        if load.images is None or images is None or images.positions is None:
            return 0
        placed = images.positions[:, span.start : span.end]
        alone = self.sequence(load.images.inside(span))
        own = np.arange(len(span)) if alone is None or alone.positions is None else alone.positions
        base = images.position(span.start)
        return span.start - base if (placed - base == own).all() else None
