"""The weights of a transformers model: which they are, and whether they have changed."""

import torch
import xxhash
from transformers import PreTrainedModel

from kvmosaic.engines.loaded_weights import sampled_digest

SAMPLE_BYTES = 4096
"""Maximum bytes of each parameter that are looked at before each request."""


class HFWeights:
    """Follows the weights of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._seen = self._look()
        self.digest = weights_digest(model)

    def have_changed(self) -> bool:
        """Look at them; whether they are others than the last time, and so is the digest."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen, self.digest = seen, weights_digest(self._model)
        return True

    def _look(self) -> tuple[int, str | None]:
        """Changes when weights are changed in place, by a training step for example, or behind torch's back, through
        ``weight.data``: some elements of each."""
        tensors = self._model.state_dict(keep_vars=True)
        versions = sum(tensor._version for tensor in tensors.values() if not tensor.is_inference())
        return versions, sampled_digest(tensors.items(), SAMPLE_BYTES)


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of all weights: another fine-tune of the same shape must get other keys, even if one row differs."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        for part in flat.split(2**28):
            digest.update(memoryview(part.cpu().numpy()))
    return digest.hexdigest()
