"""Attention of short runs by our own kernel, where that is cheaper than the backend's.

A backend reads the KV before a run for that run alone; our kernel once for all tokens of a tile. But tile by tile the
backend's is the faster one: by how much is measured at start, on the GPU, the model and the backend at hand.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvmosaic.engines.vllm.compat import paged_cache
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import PagedTokens, Row, by_sequence
from kvmosaic.kernels.sparse_attention import ROWS, Asking, Queries, parts_at_once, sparse_attention

if TYPE_CHECKING:
    from kvmosaic.engines.vllm.forward.sparse import SparseForward

CONTEXT_TOKENS, RUN_TOKENS, REPEATS = 8192, 1024, 5
"""The speed of both is that for one run, behind so much context; the median of so many times."""


class TileAttention:
    """Attends by tiles of tokens, which need not be neighbours."""

    def __init__(self, forward: "SparseForward", num_blocks: int, ranks: Ranks) -> None:
        """Nobody uses any of the ``num_blocks`` blocks yet."""
        layer = forward.layers[0]
        self._group = layer.num_heads // layer.num_kv_heads
        self._tokens = ROWS // self._group
        self._at_once = parts_at_once(forward.device, layer.num_kv_heads)
        self._device = forward.device
        # Ranks have to decide alike, or they would wait for each other in different passes.
        self.slowdown = ranks.first(self._measure(forward, num_blocks))
        """How much longer our kernel takes for one run than the backend does."""

    def is_cheaper(self, rows: Sequence[Row]) -> bool:
        """Whether to compute ``rows`` in tiles."""
        theirs = sum(-(-len(row.tokens) // self._tokens) * row.end for row in rows)
        ours = sum(len(row.tokens) * row.end for row in rows) / self._tokens
        return ours * self.slowdown < theirs

    def queries(self, sequences: Sequence[PagedTokens]) -> Queries:
        """Put the tokens of some sequences, whose blocks are in one group, into tiles."""
        asking = [Asking(positions, blocks[0]) for positions, blocks in sequences]
        return Queries.of(asking, self._group, self._device, self._at_once)

    def attend(self, layer: Any, q: torch.Tensor, queries: Queries, out: torch.Tensor) -> None:
        """Attention of ``q`` ``[tokens, heads, dim]`` over a layer's cache, into ``out``."""
        sparse_attention(q, paged_cache(layer), queries, layer.impl.scale, layer.sliding_window, out)

    def _measure(self, forward: "SparseForward", num_blocks: int) -> float:
        layer, size = forward.layers[forward.full_layers[0] if forward.full_layers else 0], forward.block_sizes[0]
        context = min(CONTEXT_TOKENS // size, forward.max_tokens // size, num_blocks - 1) * size
        tokens = min(RUN_TOKENS, context)
        blocks = [range(1, context // size + 1)]
        row = Row(range(tokens), context - tokens, blocks)
        q, k, v, out = self._draw(layer, tokens)
        queries = self.queries(by_sequence([row]))
        metadata = forward.metadata([row])[layer.layer_name]
        with torch.inference_mode():
            # No request shall wait until a kernel is compiled, neither for long runs nor for lone tokens.
            for other in {layer.sliding_window: layer for layer in forward.layers}.values():
                for each in (row, Row(range(1), context - 1, blocks)):
                    asking, _, _, result = self._draw(other, len(each.tokens))
                    self.attend(other, asking, self.queries(by_sequence([each])), result)
            ours = _seconds(lambda: self.attend(layer, q, queries, out))
            theirs = _seconds(lambda: layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=out))
        return ours / theirs

    def _draw(self, layer: Any, tokens: int) -> list[torch.Tensor]:
        """Random queries, keys, values, and room for results of a layer, ``[tokens, heads, dim]``."""
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, layer.num_heads)
        dims = (layer.head_size, layer.head_size, layer.head_size_v, layer.head_size_v)
        return [
            torch.randn(tokens, count, dim, device=self._device).to(paged_cache(layer).dtype)
            for count, dim in zip(heads, dims, strict=True)
        ]


def _seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first may compile
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])
