"""Attention of short runs by our own kernel, where that is cheaper than the backend's.

A backend reads the KV before a run for that run alone; our kernel reads it once for all tokens of a tile. Per tile,
the backend is faster. By how much is measured at start, with the GPU, model and backend in use.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from kvmosaic.engines.vllm.compat.layers import HeadsLayer, KVLayer
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.metadata import MetadataBuilder
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import PagedTokens, Run
from kvmosaic.kernels.queries import ROWS, Asking, Queries, key_ranges_at_once
from kvmosaic.kernels.sparse_attention import sparse_attention

CONTEXT_TOKENS, RUN_TOKENS, REPEATS = 8192, 1024, 5
"""Context tokens, run tokens and number of repetitions for measuring the speed of both ways."""


class TileAttention:
    """Computes attention in tiles of tokens, which need not be neighbours."""

    def __init__(self, kv: KVLayers, slowdown: float = 1.0) -> None:
        """``slowdown``: how much longer our kernel takes for one run than the backend does."""
        layer = kv.layers[0]
        self.slowdown = slowdown
        self._device = kv.device
        self._heads, self._kv_heads = layer.heads, layer.kv_heads
        self._tokens = ROWS // (layer.heads // layer.kv_heads)
        self._block_size = kv.block_sizes[0]
        self._at_once = key_ranges_at_once(kv.device, layer.kv_heads)

    @classmethod
    def measure(
        cls, kv: KVLayers, metadata: MetadataBuilder, ranks: Ranks, max_tokens: int
    ) -> "TileAttention | None":
        """Measure the slowdown. Returns ``None`` if our kernel does not support the layers' attention. To be called
        before any block is in use; ``max_tokens`` is the maximum length of a sequence."""
        is_plain = all(layer.is_plain for layer in kv.layers) and len({layer.heads for layer in kv.layers}) == 1
        if not is_plain or kv.has_shared_caches:  # layers that share one would get no metadata, and compute nothing
            return None
        tiles = cls(kv)
        # All ranks have to decide the same, or they would wait for each other in different passes.
        tiles.slowdown = ranks.first(tiles._measure(kv, metadata, max_tokens))
        return tiles

    def is_cheaper(self, runs: Sequence[Run]) -> bool:
        """Whether ``runs`` are predicted to be cheaper in tiles."""
        theirs = sum(-(-len(run.tokens) // self._tokens) * run.end for run in runs)
        ours = sum(len(run.tokens) * run.end for run in runs) / self._tokens
        return ours * self.slowdown < theirs

    def queries(self, sequences: Sequence[PagedTokens], heads: int | None = None) -> Queries:
        """Put the tokens of some sequences, whose blocks are in one group, into tiles, for layers with ``heads``
        query heads; by default, for the model's."""
        asking = [
            Asking(positions, blocks[0][: int(positions[-1]) // self._block_size + 1])  # later ones are not read
            for positions, blocks in sequences
        ]
        return Queries.of(asking, (heads or self._heads) // self._kv_heads, self._device, self._at_once)

    def attend(self, layer: KVLayer, q: torch.Tensor, queries: Queries, out: torch.Tensor) -> None:
        """Attention of ``q`` ``[tokens, heads, dim]`` over a layer's cache, into ``out``."""
        sparse_attention(q, layer.cache, queries, layer.scale, layer.window, out)

    def _measure(self, kv: KVLayers, metadata: MetadataBuilder, max_tokens: int) -> float:
        layer, size = kv.layers[kv.full[0] if kv.full else 0], kv.block_sizes[0]
        assert isinstance(layer, HeadsLayer)  # it is plain
        context = min(CONTEXT_TOKENS // size, max_tokens // size, kv.num_blocks - 1) * size
        tokens = min(RUN_TOKENS, context)
        blocks = [range(1, context // size + 1)]
        run = Run(range(tokens), context - tokens, blocks)
        work = kv.make_pass([run])
        q, k, v, out = self._draw(layer, tokens)
        queries = self.queries(work.sequences)
        told = metadata.build(work)[layer.name]
        with torch.inference_mode():
            # Compile the kernels now, for long runs and for single tokens, so that no request waits for that.
            for other in {(layer.window, layer.heads): layer for layer in kv.kept}.values():
                for each in (run, Run(range(1), context - 1, blocks)):
                    asking, _, _, result = self._draw(other, len(each.tokens))
                    self.attend(other, asking, self.queries(kv.make_pass([each]).sequences, other.heads), result)
            ours = _seconds(lambda: self.attend(layer, q, queries, out))
            theirs = _seconds(lambda: layer.attend(q, k, v, told, out))
        return ours / theirs

    def _draw(self, layer: KVLayer, tokens: int) -> list[torch.Tensor]:
        """Random queries, keys and values of a layer, and an output buffer, ``[tokens, heads, dim]``."""
        heads = (layer.heads, layer.kv_heads, layer.kv_heads, layer.heads)
        dims = (layer.k_dim, layer.k_dim, layer.v_dim, layer.v_dim)
        return [
            torch.randn(tokens, count, dim, device=self._device).to(layer.cache.dtype)
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
