"""Which LoRA adapters this rank has, by their weights: KV that was computed with an adapter depends on them."""

import hashlib
import logging
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from kvmosaic.engines.vllm.compat.adapters import active_adapters, adapter_weights, loaded_adapters
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.messages import Adapter

logger = logging.getLogger(__name__)


class _Loaded(NamedTuple):
    model: "weakref.ref[Any]"
    """vLLM's object, which is another one after each load."""
    digest: bytes | None
    """``None`` if it could not be computed."""


class LoadedAdapters:
    """Follows what vLLM loads. It looks at the weights in memory: files may have changed since they were read.
    Adapters are never loaded, activated or evicted here."""

    def __init__(self, runner: Any, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._loaded: dict[int, _Loaded] = {}
        self._news: dict[int, bytes] = {}

    def look(self) -> None:
        """Identify adapters that were loaded since the last call. Called in every step, by all ranks."""
        there = loaded_adapters(self._runner)
        for gone in self._loaded.keys() - there.keys():
            del self._loaded[gone]
        for adapter_id, model in there.items():
            known = self._loaded.get(adapter_id)
            if known is not None and known.model() is model:
                continue
            digest = self._digest(model)
            self._loaded[adapter_id] = _Loaded(weakref.ref(model), digest)
            if digest is not None:
                self._news[adapter_id] = digest

    def take_news(self) -> dict[int, bytes]:
        """Digests of adapters that were loaded since the last call, by vLLM's number."""
        news, self._news = self._news, {}
        return news

    def can_use(self, adapter: Adapter | None) -> bool:
        """Whether a forward can use this adapter on all ranks, and its weights are still those it was planned with.
        Called by all ranks in the same order."""
        if adapter is None:
            return True
        known = self._loaded.get(adapter.id)
        is_same = known is not None and known.digest == adapter.digest
        return self._ranks.all_have([is_same and adapter.id in active_adapters(self._runner)])[0]

    def _digest(self, model: Any) -> bytes | None:
        try:
            return weights_digest(adapter_weights(self._runner, model))
        except Exception:
            logger.exception("could not identify an adapter by its weights; its requests are prefilled")
            return None


def weights_digest(weights: Iterable[tuple[str, torch.Tensor | str]]) -> bytes:
    """Digest of named tensors and texts, 32 bytes. All numbers count: adapters are small, and differ in any of
    them."""
    digest = hashlib.sha256()
    for name, value in weights:
        if isinstance(value, str):
            digest.update(repr((name, value)).encode())
        else:
            digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
