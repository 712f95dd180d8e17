"""A policy's view of a request in vLLM."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvmosaic.blend.base import QUERY_TOKENS, AssembledPrompt, KVPart
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.stand_ins import first_stand_in
from kvmosaic.engines.vllm.forward.images import SequenceImages
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import Observer, SparseForward
from kvmosaic.engines.vllm.messages import ChunkLoad, adapter_id
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.kernels.scores import attention_weights


class VllmProbe(AssembledPrompt):
    """Probes run through the sparse forward and stop at the last layer they need. Before the first probe, all tokens
    before the question that are in no chunk have to be computed."""

    def __init__(
        self,
        load: ChunkLoad,
        moves: Sequence[tuple[ChunkKV, int]],
        forward: SparseForward,
        paged: RequestBlocks,
        ranks: Ranks,
        full_layers: Sequence[int],
        images: SequenceImages | None = None,
    ) -> None:
        """``moves``: the entries in the load's blocks, and their positions. ``full_layers`` are numbered in the whole
        model, like all layers here."""
        spans = tuple(Span(at, at + len(entry.tokens)) for entry, at in moves)
        prompt = ChunkedPrompt(load.prompt.token_ids, spans)
        super().__init__(prompt, load.prompt.question, ranks.num_layers, full_layers)
        self.computed_layer: int | None = None
        """Layer up to which all chunk tokens were computed, if they were."""
        self._blocks = [(*row, *load.spare) for row in load.blocks]
        """Block ids, per KV cache group. They also cover the part of the question that is probed; blocks below
        ``start`` are not written to."""
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        """Attention of the question that was computed before a policy asked for it, by layers."""
        self._start = load.start
        self._adapter_id = adapter_id(load.adapter)
        self._images = images
        self._moves = moves
        self._forward = forward
        self._paged = paged
        self._ranks = ranks
        # If vLLM had too few blocks to lend, or was not asked to, fewer tokens of the question can be probed, or
        # none.
        room = len(self._blocks[0]) * forward.kv.block_sizes[0] if load.may_probe else 0
        # Images in the question are left to vLLM, so only the text before them is probed.
        text = self.asked.start + first_stand_in(prompt.tokens_of(self.asked))
        self.asked = Span(self.asked.start, max(self.asked.start, min(self.asked.end, room, text)))

    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        weights = self._known.get(tuple(layers))
        if weights is None:
            [weights] = self.ask([self], layers)
        self.charged += len(self.asked) * (layers[-1] + 1)
        return weights

    @staticmethod
    def ask(probes: "Sequence[VllmProbe]", layers: Sequence[int]) -> list[torch.Tensor]:
        """The attention of several requests' questions at ``layers``, ``[chunk tokens]`` each. One pass over all of
        them takes hardly longer than over one: it reads the weights once, and launches each kernel once."""
        assert probes
        assert all(probe.asked for probe in probes)
        noted: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            noted[index].append(q.clone())  # the next layers may reuse its memory

        runs = [probe._run(probe.asked.start, probe.asked.end) for probe in probes]
        probes[0]._forward.probe(runs, layers, observe)
        lengths = [len(probe.asked) for probe in probes]
        rows = {layer: torch.cat(queries).split(lengths) for layer, queries in noted.items() if queries}
        return [
            probe._attention(layers, {layer: queries[index] for layer, queries in rows.items()})
            for index, probe in enumerate(probes)
        ]

    def know(self, layers: Sequence[int], weights: torch.Tensor) -> None:
        """Take the result of :meth:`ask`, for which a policy will ask."""
        self._known[tuple(layers)] = weights

    def _attention(self, layers: Sequence[int], queries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The attention of its question at ``layers``, whose ``queries`` are ``[tokens, heads, dim]`` at each of them
        that this stage has."""
        modules = self._forward.kv.layers
        # Each stage has some of the layers, or none.
        own = [layer - self._ranks.layers.start for layer in layers if layer in self._ranks.layers]
        parts = [self._paged.reused(self._moves, self._blocks, own, part) for part in modules[0].score_parts]
        weights = torch.zeros(self.chunk_tokens, device=self._forward.kv.device)
        for index, *keys in zip(own, *parts, strict=True):
            layer, asked = modules[index], queries[index + self._ranks.layers.start]
            asking = layer.score_queries(asked[-QUERY_TOKENS:]).transpose(0, 1)
            weights += attention_weights(asking, torch.cat(keys, dim=-1), layer.scale).mean(0)
        return self._ranks.sum(weights) / (len(layers) * modules[0].heads * self._ranks.per_stage)

    def deviation(self, layer: int, part: KVPart) -> torch.Tensor:
        changed = torch.zeros(self.chunk_tokens, device=self._forward.kv.device)
        if layer not in self._ranks.layers:  # another stage measures it
            self.compute_chunks(layer)
            return self._ranks.sum(changed)
        fresh: list[torch.Tensor] = []

        def observe(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            fresh.append((k if part == "k" else v).transpose(0, 1).clone())

        # Read before it is overwritten.
        own = layer - self._ranks.layers.start
        reused = next(self._paged.reused(self._moves, self._blocks, [own], part))
        self.compute_chunks(layer, observe)
        positions = self.positions()
        computed = positions >= self._start
        rows = (positions[computed] - self._first_computed).to(reused.device)
        distance = torch.cat(fresh, dim=1)[:, rows].float() - reused[:, computed.to(reused.device)].float()
        changed[computed.to(distance.device)] = distance.square().sum((0, 2))
        return self._ranks.sum(changed)

    def reused(self, layer: int, part: KVPart, positions: np.ndarray) -> torch.Tensor:
        """K or V of reused tokens at ascending ``positions`` of a layer that no probe has computed, ``[kv_heads,
        tokens, dim]``. There are no other pipeline stages."""
        [rows] = self._paged.reused(self._moves, self._blocks, [layer], part)
        places = np.searchsorted(self.positions().numpy(), positions)
        return rows[:, torch.from_numpy(places).to(rows.device)]

    def compute_chunks(self, layer: int, observe: Observer = lambda *_: None) -> int:
        """Compute all chunk tokens, and the text between them, up to the K and V of ``layer``, which is returned."""
        self._forward.probe([self._run(self._first_computed, self.prompt.chunks[-1].end)], [layer], observe)
        self.charged += self.chunk_tokens * (layer + 1)
        self.computed_layer = layer
        return layer

    @property
    def keeps_fresh(self) -> bool:
        """Whether the KV of tokens that no entry provides is what was computed for them before the choice, in all
        layers."""
        return self.computed_layer is None

    def first_changed(self, recomputed: np.ndarray) -> int:
        """The first position whose KV is no longer that from before the choice, if the positions ``recomputed``
        (ascending) were chosen."""
        if self.computed_layer is not None:
            return self._first_computed
        return int(recomputed[0]) if len(recomputed) else self.prompt.question.start

    @property
    def _first_computed(self) -> int:
        return max(self.prompt.chunks[0].start, self._start)

    def _run(self, start: int, end: int) -> Run:
        return Run(self.prompt.token_ids[start:end], start, self._blocks, self._adapter_id, self._images)
