"""What a policy sees of a request in vLLM."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from kvmosaic.blend.base import QUERY_TOKENS, AssembledPrompt, Part
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.rotation import rotate_
from kvmosaic.engines.rotary import LayerRotary, turns_for
from kvmosaic.engines.vllm.ranks import Ranks
from kvmosaic.engines.vllm.sparse import Observer, Row, SparseForward
from kvmosaic.kernels.remap import LayerTurn
from kvmosaic.kernels.scores import attention_weights


class VllmAssembled(AssembledPrompt):
    """Probes run through the sparse forward and stop at the last layer they need. K and V of chunks are read from
    their entries: blocks may be packed as only the backend knows."""

    def __init__(
        self,
        prompt: ChunkedPrompt,
        question: Span,
        moves: Sequence[tuple[ChunkKV, int]],
        first: int,
        blocks: Sequence[Sequence[int]],
        forward: SparseForward,
        rotary: Sequence[LayerRotary | None],
        ranks: Ranks,
        compute_fresh: Callable[[], None],
    ) -> None:
        """``blocks`` also cover the question that is probed; those below position ``first`` are not written to.
        ``compute_fresh`` computes the tokens in no chunk before the question, if that was not done yet."""
        super().__init__(prompt, question, len(forward.layers), forward.full_layers)
        assert [at for _, at in moves] == [span.start for span in prompt.chunks]
        # When vLLM was too short of blocks to lend some, fewer tokens are asked.
        self.probe = Span(self.probe.start, min(self.probe.end, len(blocks[0]) * forward.block_sizes[0]))
        assert self.probe
        self.computed_layer: int | None = None
        """Up to this layer all chunk tokens were computed."""
        self._moves = moves
        self._first = first
        self._rotary = rotary
        self._blocks = blocks
        self._forward = forward
        self._ranks = ranks
        self._compute_fresh = compute_fresh

    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        self._compute_fresh()
        queries: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            if index in queries:
                queries[index].append(q)

        self._forward.probe([self._row(self.probe.start, self.probe.end)], layers[-1], observe)
        self.charged += len(self.probe) * (layers[-1] + 1)
        weights = []
        for layer, passes in queries.items():
            asking = torch.cat(passes)[-QUERY_TOKENS:].transpose(0, 1)
            weights.append(
                attention_weights(asking, self._reused(layer, "k"), self._forward.layers[layer].impl.scale)
            )
        heads = self._forward.layers[0].num_heads * self._ranks.count
        return self._ranks.sum(torch.stack(weights)) / heads

    def deviation(self, layer: int, part: Part) -> torch.Tensor:
        fresh: list[torch.Tensor] = []

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            if index == layer:
                fresh.append((k if part == "k" else v).transpose(0, 1).clone())

        self.compute_chunks(layer, observe)
        reused = self._reused(layer, part)
        skipped = max(0, self._first - self.prompt.chunks[0].start)
        distance = torch.cat(fresh, dim=1).float() - reused[:, skipped:].float()
        changed = torch.zeros(self.chunk_tokens, device=distance.device)
        changed[skipped:] = distance.square().sum((0, 2))
        return self._ranks.sum(changed)

    def compute_chunks(self, layer: int, observe: Observer = lambda *_: None) -> None:
        """Compute all chunk tokens up to the K and V of ``layer``."""
        self._compute_fresh()
        rows = [self._row(max(span.start, self._first), span.end) for span in self.prompt.chunks]
        self._forward.probe(rows, layer, observe)
        self.charged += self.chunk_tokens * (layer + 1)
        self.computed_layer = layer

    def _row(self, start: int, end: int) -> Row:
        return Row(self.prompt.token_ids[start:end], start, self._blocks)

    def _reused(self, layer: int, part: Part) -> torch.Tensor:
        """K or V of the chunk tokens at one layer, turned to their places: ``[kv_heads, chunk tokens, dim]``."""
        which = 0 if part == "k" else 1
        rows = torch.cat([entry.layer(layer)[which].to(self._forward.device) for entry, _ in self._moves], dim=1)
        turn = self._turns[layer]
        if turn is not None and turn.columns.part == part:
            rotate_(rows, turn.turn, turn.columns)
        return rows

    @cached_property
    def _turns(self) -> list[LayerTurn | None]:
        """How keys turn on their way, per layer. vLLM's tables do not depend on a prompt's length."""
        return turns_for(self._moves, 0, self._rotary)
