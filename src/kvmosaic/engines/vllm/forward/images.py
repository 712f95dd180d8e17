"""Images of paged sequences: embeddings instead of tokens, and rotary positions that are no indices."""

import numpy as np
import torch

from kvmosaic.engines.vllm.compat.images import ImageModel, place_of
from kvmosaic.engines.vllm.messages import Images


class SequenceImages:
    """The images of one paged sequence. An image is encoded when one of its tokens is computed, at most once."""

    def __init__(self, model: ImageModel, images: Images, behind: int = 0) -> None:
        """``behind``: number of tokens of the sequence before those of ``images``, which are text."""
        self._model = model
        self._images = images
        self._behind = behind
        self._encoded: dict[int, torch.Tensor] = {}
        positions = model.positions(images.token_ids, images.features)
        if positions is not None:
            axes = len(positions)
            before = np.broadcast_to(np.arange(behind), (axes, behind))
            positions = np.concatenate([before, positions + behind], axis=1)
        self.positions = positions
        """Rotary position of each token, ``[axes, tokens]`` int64; ``None``: its index."""

    def position(self, index: int) -> int:
        """Rotary position of a token before which no image is cut."""
        return index if self.positions is None else int(self.positions[0, index])

    def rows(self, start: int, end: int) -> list[torch.Tensor]:
        """Embeddings of the image tokens among ``start .. end-1``, in order, each ``[tokens, hidden]``."""
        found = []
        for number in self._images.between(start - self._behind, end - self._behind):
            feature = self._images.features[number]
            first, last = (place + self._behind for place in place_of(feature))
            low, high = max(start, first) - first, min(end, last) - first
            begin, stop = feature.mm_position.get_embeds_indices_in_range(low, high)
            if begin == stop:
                continue
            if number not in self._encoded:
                self._encoded[number] = self._model.encode(feature)
            found.append(self._encoded[number][begin:stop])
        return found
