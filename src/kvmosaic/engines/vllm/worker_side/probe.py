"""What a policy sees of a request in vLLM."""

from collections.abc import Callable, Sequence

import torch

from kvmosaic.blend.base import QUERY_TOKENS, AssembledPrompt, Part
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.forward.sparse import Observer, SparseForward
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.kernels.scores import attention_weights


class VllmAssembled(AssembledPrompt):
    """Probes run through the sparse forward and stop at the last layer they need. K and V of chunks are read from
    where ``kv`` knows to find them."""

    def __init__(
        self,
        prompt: ChunkedPrompt,
        question: Span,
        moves: Sequence[tuple[ChunkKV, int]],
        first: int,
        blocks: Sequence[Sequence[int]],
        forward: SparseForward,
        kv: RequestBlocks,
        ranks: Ranks,
        compute_fresh: Callable[[], None],
    ) -> None:
        """``blocks`` also cover the question that is probed; those below position ``first`` are not written to.
        ``compute_fresh`` computes the tokens in no chunk before the question, if that was not done yet."""
        super().__init__(prompt, question, len(forward.layers), forward.full_layers)
        assert [at for _, at in moves] == [span.start for span in prompt.chunks]
        # When vLLM was too short of blocks to lend some, or was not asked to, fewer tokens can be asked, or none.
        room = len(blocks[0]) * forward.block_sizes[0]
        self.probe = Span(self.probe.start, max(self.probe.start, min(self.probe.end, room)))
        self.computed_layer: int | None = None
        """Up to this layer all chunk tokens were computed."""
        self._moves = moves
        self._first = first
        self._kv = kv
        self._blocks = blocks
        self._forward = forward
        self._ranks = ranks
        self._compute_fresh = compute_fresh

    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        assert self.probe
        self._compute_fresh()
        queries: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            queries[index].append(q.clone())  # the next layers may use its memory again

        self._forward.probe([self._row(self.probe.start, self.probe.end)], layers, observe)
        self.charged += len(self.probe) * (layers[-1] + 1)
        weights = []
        for layer, keys in zip(layers, self._kv.reused(self._moves, self._blocks, layers, "k"), strict=True):
            asking = torch.cat(queries[layer])[-QUERY_TOKENS:].transpose(0, 1)
            weights.append(attention_weights(asking, keys, self._forward.layers[layer].impl.scale))
        heads = self._forward.layers[0].num_heads * self._ranks.count
        return self._ranks.sum(torch.stack(weights).mean((0, 1))) / heads

    def deviation(self, layer: int, part: Part) -> torch.Tensor:
        fresh: list[torch.Tensor] = []

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            fresh.append((k if part == "k" else v).transpose(0, 1).clone())

        # Before others are written in its place.
        reused = next(self._kv.reused(self._moves, self._blocks, [layer], part))
        self.compute_chunks(layer, observe)
        skipped = max(0, self._first - self.prompt.chunks[0].start)
        distance = torch.cat(fresh, dim=1).float() - reused[:, skipped:].float()
        changed = torch.zeros(self.chunk_tokens, device=distance.device)
        changed[skipped:] = distance.square().sum((0, 2))
        return self._ranks.sum(changed)

    def compute_chunks(self, layer: int, observe: Observer = lambda *_: None) -> None:
        """Compute all chunk tokens up to the K and V of ``layer``."""
        self._compute_fresh()
        rows = [self._row(max(span.start, self._first), span.end) for span in self.prompt.chunks]
        self._forward.probe(rows, [layer], observe)
        self.charged += self.chunk_tokens * (layer + 1)
        self.computed_layer = layer

    def _row(self, start: int, end: int) -> Row:
        return Row(self.prompt.token_ids[start:end], start, self._blocks)
