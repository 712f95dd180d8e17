"""Identifies the weights of a transformers model and notices changes."""

import torch
import xxhash
from transformers import PreTrainedModel

from kvmosaic.engines.loaded_weights import sampled_digest

SAMPLE_BYTES = 4096
"""Maximum bytes of each parameter that are checked before each request."""


class HFWeights:
    """Tracks the weights of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._seen = self._look()
        self.digest = weights_digest(model)

    def have_changed(self) -> bool:
        """Check the weights. Returns whether they changed since the last check; if so, the digest is updated."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen, self.digest = seen, weights_digest(self._model)
        return True

    def _look(self) -> tuple[int, str | None]:
        """A value that changes with the weights. Versions count changes in place, for example by a training step. The
        digest of some elements of each also shows changes that torch does not count, through ``weight.data``."""
        tensors = self._model.state_dict(keep_vars=True)
        versions = sum(tensor._version for tensor in tensors.values() if not tensor.is_inference())
        return versions, sampled_digest(tensors.items(), SAMPLE_BYTES)


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of all weights: a fine-tune of the same shape must get other keys, even if only one row differs."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        for part in flat.split(2**28):
            digest.update(memoryview(part.cpu().numpy()))
    return digest.hexdigest()
