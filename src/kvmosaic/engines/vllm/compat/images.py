"""Images of requests in vLLM: where they are, what they contain, and how a model reads them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from blake3 import blake3  # with which vLLM itself hashes images: ten times as fast as SHA-256 on many machines
from vllm.multimodal.inputs import MultiModalFeatureSpec

from kvmosaic.engines.vllm.compat.weights import loaded_model


def place_of(feature: MultiModalFeatureSpec) -> tuple[int, int]:
    """First token of a feature (an image, a video, …) and the token behind its last."""
    place = feature.mm_position
    return place.offset, place.offset + place.length


def embedded_tokens(feature: MultiModalFeatureSpec) -> np.ndarray:
    """Which tokens of a feature have embeddings of their own, ``[tokens]`` bool. The others are text."""
    mask = feature.mm_position.is_embed
    return np.ones(feature.mm_position.length, dtype=bool) if mask is None else mask.cpu().numpy().astype(bool)


def moved(feature: MultiModalFeatureSpec, start: int) -> MultiModalFeatureSpec:
    """The same feature in a prompt in which it begins at ``start``."""
    return replace(feature, mm_position=replace(feature.mm_position, offset=start))


def is_image(feature: MultiModalFeatureSpec) -> bool:
    return feature.modality == "image"


def claimed_name(feature: MultiModalFeatureSpec) -> bytes:
    """vLLM's name of a feature. It is a hash of the content, unless the client chose another name."""
    return feature.identifier.encode(errors="surrogatepass")


def content_hash(feature: MultiModalFeatureSpec) -> bytes | None:
    """Hash of what the model's encoder reads, 32 bytes; ``None`` if this process does not have it. vLLM may keep it
    in memory that only the API server and the workers share."""
    if feature.data is None:
        return None
    state = blake3()
    for field, element in sorted(feature.data.items()):
        state.update(f"{field}:".encode())
        if not _add(state, getattr(element, "data", None)):
            return None
    digest: bytes = state.digest()
    return digest


def nbytes_of(feature: MultiModalFeatureSpec) -> int:
    """Number of bytes of what the model's encoder reads, as far as this process has it."""
    waiting = [getattr(element, "data", None) for element in (feature.data or {}).values()]
    count = 0
    while waiting:
        data = waiting.pop()
        if isinstance(data, list | tuple):
            waiting += data
        elif isinstance(data, torch.Tensor):
            count += data.nbytes
    return count


def _add(state: Any, data: Any) -> bool:
    """Hash tensors, which may be nested in lists. Returns whether everything was hashed."""
    if isinstance(data, list | tuple):
        state.update(f"{len(data)} of".encode())
        return all(_add(state, each) for each in data)
    if not isinstance(data, torch.Tensor):
        return False
    state.update(f"{data.dtype}{list(data.shape)}".encode())
    state.update(data.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return True


def keep_whole(output: Any, features_of: Callable[[str], Sequence[MultiModalFeatureSpec]]) -> None:
    """Have the workers get all data of the features of requests that begin in ``output``, a ``SchedulerOutput``.
    ``features_of``: those of a request, by its id; none if it keeps what vLLM sends. Since 0.32, vLLM leaves out what
    is computed already. By its source, the V1 runner needs the data again if such a request is preempted, and its KV
    is gone when it resumes; no test has shown that yet."""
    for new in output.scheduled_new_reqs:
        new.mm_features = list(features_of(new.req_id)) or new.mm_features


class ImageModel:
    """The part of vLLM's model that reads images."""

    def __init__(self, runner: Any) -> None:
        self._model = loaded_model(runner)
        self._device: torch.device = runner.device
        self.has_axes: bool = runner.model_config.uses_mrope
        """Whether tokens of images have a position on each of several axes (M-RoPE)."""

    def encode(self, feature: MultiModalFeatureSpec) -> torch.Tensor:
        """Embeddings of an image, ``[embedded tokens, hidden]``."""
        from vllm.multimodal.utils import group_and_batch_mm_kwargs

        if feature.data is None:
            raise ValueError("vLLM sent no pixels of an image")
        [(_, _, arguments)] = group_and_batch_mm_kwargs([(feature.modality, feature.data)], device=self._device)
        [output] = self._model.embed_multimodal(**arguments)
        wanted = feature.mm_position.get_num_embeds()
        if len(output) != wanted:
            raise ValueError(f"the encoder returned {len(output)} embeddings for {wanted} tokens of an image")
        return output

    def embed(self, token_ids: torch.Tensor, images: Sequence[torch.Tensor], is_image: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, ``[tokens, hidden]``: those of ``images``, one after the other, where ``is_image``,
        those of ``token_ids`` elsewhere."""
        embeddings: torch.Tensor = self._model.embed_input_ids(
            token_ids, multimodal_embeddings=list(images), is_multimodal=is_image
        )
        return embeddings

    def positions(self, token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]) -> np.ndarray | None:
        """Rotary positions of a prompt, ``[axes, tokens]`` int64; ``None`` if they are the indices of its tokens."""
        if not self.has_axes:
            return None
        positions, _ = self._model.get_mrope_input_positions(list(token_ids), list(features))
        return np.asarray(positions, dtype=np.int64)
