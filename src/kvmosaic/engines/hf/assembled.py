"""What a policy sees of a request of the embedded engine."""

from collections.abc import Sequence

import torch

from kvmosaic.blend.base import QUERY_TOKENS, AssembledPrompt, Part
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.kernels.scores import attention_weights


class HFAssembled(AssembledPrompt):
    """Probes run through the sparse forward and stop at the last layer they need."""

    def __init__(self, prompt: ChunkedPrompt, engine: HFModel, kv: RequestKV, length: int) -> None:
        super().__init__(prompt, engine.format.layers, engine.full_layers)
        self._engine = engine
        self._kv = kv
        self._length = length

    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        places = self.positions().to(self._kv.k.device)
        weights: list[torch.Tensor] = []

        def observe(layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
            if layer in layers:
                asking = q[:, -min(QUERY_TOKENS, len(self.probe)) :]
                weights.append(attention_weights(asking, k[:, places], scale) / q.shape[0])

        rows = [position for position in self.prompt.fresh_positions() if position < self.probe.end]
        self._engine.probe(self.prompt, rows, self._kv, self._length, layers[-1], observe)
        self.charged += len(self.probe) * (layers[-1] + 1)
        return torch.stack(weights)

    def deviation(self, layer: int, part: Part) -> torch.Tensor:
        places = self.positions().to(self._kv.k.device)
        reused = getattr(self._kv, part)[layer][:, places].clone()
        rows = range(self.prompt.chunks[-1].end)
        self._engine.probe(self.prompt, rows, self._kv, self._length, layer)
        fresh = getattr(self._kv, part)[layer][:, places]
        self.charged += self.chunk_tokens * (layer + 1)
        return (fresh.float() - reused.float()).square().sum((0, 2))
