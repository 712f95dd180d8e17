"""A request of the embedded engine, as policies see it."""

from collections.abc import Sequence

import torch

from kvmosaic.blend.base import QUERY_TOKENS, AssembledPrompt, KVPart
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.kernels.scores import attention_weights


class HFProbe(AssembledPrompt):
    """Probes run through the sparse forward and stop at the last layer they need."""

    def __init__(self, prompt: ChunkedPrompt, question: Span, engine: HFModel, kv: RequestKV) -> None:
        super().__init__(prompt, question, engine.format.layers, engine.full_layers)
        self._engine = engine
        self._kv = kv
        self._length = len(prompt.token_ids)

    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        positions = self.positions().to(self._kv.k.device)
        weights: list[torch.Tensor] = []

        def observe(layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
            if layer in layers:
                asking = q[:, : q.shape[1] - len(extra)][:, -min(QUERY_TOKENS, len(self.asked)) :]
                weights.append(attention_weights(asking, k[:, positions], scale) / q.shape[0])

        rows = [position for position in self.prompt.fresh_positions() if position < self.asked.end]
        extra = self._last_token(rows)
        self._engine.probe(self.prompt, [*rows, *extra], self._kv, self._length, layers[-1], observe)
        self.charged += len(self.asked) * (layers[-1] + 1)
        return torch.stack(weights).mean((0, 1))

    def deviation(self, layer: int, part: KVPart) -> torch.Tensor:
        positions = self.positions().to(self._kv.k.device)
        reused = getattr(self._kv, part)[layer][:, positions].clone()
        rows = range(self.prompt.chunks[-1].end)
        self._engine.probe(self.prompt, [*rows, *self._last_token(rows)], self._kv, self._length, layer)
        fresh = getattr(self._kv, part)[layer][:, positions]
        self.charged += self.chunk_tokens * (layer + 1)
        return (fresh.float() - reused.float()).square().sum((0, 2))

    def _last_token(self, rows: Sequence[int]) -> list[int]:
        """The prompt's last position, if it is not among ``rows``: it puts rotary tables that depend on a prompt's
        length into the state they have for this one."""
        last = self._length - 1
        return [last] if rows[-1] < last else []
