"""The sparse forward: compute any subset of paged sequences' tokens with vLLM's own model and backend.

Every run of consecutive tokens becomes a *virtual sequence*: its own query offsets and length over the block table of
the sequence it belongs to. vLLM writes the K and V of all runs before attention reads, so each token sees exactly the
positions at or before its own: fresh where selected, cached elsewhere. If there are many short runs, and our kernels
can read the cache, our own kernel computes attention instead (``tile_attention.py``).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from kvmosaic.engines.vllm.compat.adapters import with_adapter
from kvmosaic.engines.vllm.compat.drafts import Drafter
from kvmosaic.engines.vllm.compat.graphs import graph_inputs, graph_size
from kvmosaic.engines.vllm.compat.images import ImageModel
from kvmosaic.engines.vllm.compat.layers import Backend, KVLayer, attention_by
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.layer_arrivals import LayerArrivals
from kvmosaic.engines.vllm.forward.metadata import MetadataBuilder
from kvmosaic.engines.vllm.forward.narrowing import Narrowing, SeenEnough
from kvmosaic.engines.vllm.forward.pass_attention import InParts, InTiles, PassAttention
from kvmosaic.engines.vllm.forward.ranks import RankLostError, Ranks
from kvmosaic.engines.vllm.forward.runs import Pass, Run, padded
from kvmosaic.engines.vllm.forward.stages import Stages
from kvmosaic.engines.vllm.forward.tile_attention import TileAttention

Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer's number, its queries ``[tokens, heads, dim]``, K and V ``[tokens, kv_heads, dim]``."""


class SparseForward:
    """Computes runs, in as many passes as needed."""

    def __init__(
        self,
        vllm_config: Any,
        runner: Any,
        kv: KVLayers,
        metadata: MetadataBuilder,
        *,
        ranks: Ranks,
        arrivals: LayerArrivals | None,
        tiles: TileAttention | None,
        images: ImageModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """``arrivals``: KV that is being copied into the cache; ``tiles``: attention by our own kernel, if it can
        read the cache; ``images``: the part of the model that reads images, if it can be used; ``drafter``: a draft
        model that computes KV for all tokens of which the model's is computed in all layers."""
        self.kv = kv
        self._ranks = ranks
        self._stages = Stages()
        self._config = vllm_config
        self._runner = runner
        self._metadata = metadata
        self._arrivals = arrivals
        self._tiles = tiles
        self._images = images
        self._drafter = drafter
        # On a CPU, vLLM's compiled code is traced only for its own steps; on an NPU, it was never tried. The compiled
        # code of some models takes embeddings. Between pipeline stages, it takes hidden states from buffers of the
        # step in progress.
        takes_embeddings = (
            getattr(runner, "supports_mm_inputs", False) or vllm_config.model_config.enable_prompt_embeds
        )
        self._runs_compiled = runner.device.type == "cuda" and not takes_embeddings and ranks.stages == 1

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens that vLLM computes in a step, and we in a pass."""
        return int(self._config.scheduler_config.max_num_batched_tokens)

    def warm_up(self) -> None:
        """Compute one token in a block that is not in use yet. For a single token, torch compiles some code of models
        with several ranks again. That may take seconds, in which a step would keep all requests waiting."""
        self.outputs([Run((0,), 0, [[1] for _ in self.kv.block_sizes])])

    def run(self, runs: Sequence[Run]) -> None:
        """Compute all runs. Runs of one sequence come in ascending order, so that passes build on each other."""
        for work in self._passes(self.kv.first_runs_first(runs)):
            # The order of runs within a pass is free: all K and V are written before any are read.
            self._forward(self.kv.short_first(work), graphs=True)

    def outputs(self, runs: Sequence[Run], shift: int = 0) -> torch.Tensor:
        """Compute all runs and return the hidden states behind this rank's last layer, ``[tokens, hidden]``. CUDA
        graphs are not used, because the next pass would overwrite their results. With ``shift``, the model gets
        positions that are higher by that number."""
        return torch.cat([self._forward(work, shift) for work in self._passes(runs)])

    def output(self, run: Run, *, graphs: bool) -> torch.Tensor:
        """Like :meth:`outputs`, of a run that fits into one pass, with or without CUDA graphs."""
        [work] = self._passes([run])
        return self._forward(work, graphs=graphs).clone()

    def capture(self, runs: Sequence[Run], shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all runs and return the K and V that entries hold of them: ``[layers, tokens, heads, dim]`` each,
        keys rotated. With ``shift``, the model gets positions that are higher by that number, while runs see the same
        keys."""
        noted: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in self.kv.kept]

        def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            for kept, rows in zip(noted[index], (k, v), strict=True):
                kept.append(rows.clone())

        for work in self._passes(runs):
            self._forward(work, shift, note, range(len(self.kv.kept)))
        k, v = (torch.stack([torch.cat(layer[which]) for layer in noted]) for which in (0, 1))
        return k, v

    def probe(self, runs: Sequence[Run], layers: Sequence[int], observe: Observer) -> None:
        """Compute runs only up to the K and V of the last of ``layers``, which are also written. ``layers`` are
        numbered in the whole model. ``observe`` is called in every pass for those of them that this rank has."""
        own, last = self._ranks.layers, layers[-1]
        mine = {layer - own.start: layer for layer in layers if layer in own}
        for work in self._passes(runs):
            if last < own.start:
                self._ranks.go_on()  # earlier stages compute all of it
                continue

            def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Pass = work) -> None:
                observe(mine[index], q, k, v)
                if mine[index] == last:
                    self.kv.write(self.kv.layers[index], k, v, work.slots)
                    raise SeenEnough

            with suppress(SeenEnough):
                self._forward(work, 0, note, mine, graphs=True, hands_on=last >= own.stop)

    @property
    def can_narrow(self) -> bool:
        """Whether :meth:`narrow` can be tried."""
        return self._ranks.stages == 1 and not self.kv.has_shared_caches and self._metadata.can_replace

    def narrow(self, narrowing: Narrowing) -> str | None:
        """Compute a pass whose tokens become fewer, which have to come in ascending order. Their KV in the layers
        that do not compute them any more stays as it was, and so does all KV of a draft model, which needs the output
        for every token. Returns why the model cannot do this, if so."""
        work = narrowing.work
        with suppress(SeenEnough), torch.inference_mode():
            attention = self._attention(work)

            def attend(layer: KVLayer, q: torch.Tensor, k: Any, v: Any, out: torch.Tensor, backend: Backend) -> None:
                self._wait_for(layer)
                narrowing.computed(self.kv.index_of[layer.name], k, v)
                attention.compute(layer, q, out, backend)

            def follow(rest: Pass) -> None:
                nonlocal attention
                attention = self._attention(rest)
                rests.enter_context(with_adapter(self._runner, rest.adapter_id, len(rest.sequences), rest.num_tokens))
                self._metadata.replace(rest, attention.metadata)

            with (
                with_adapter(self._runner, work.adapter_id, len(work.sequences), work.num_tokens),
                attention_by(attend, self._wait_for, self.kv.layers),
                self._metadata.context(work, attention.metadata, padding=0, graph=None, skip_compiled=True),
                ExitStack() as rests,
                narrowing.active(follow),
                self._entering_model(),
            ):
                self._model(work, work.token_ids, work.rotary_positions)
        return narrowing.problem

    def _attention(self, work: Pass) -> PassAttention:
        """Attention of a pass that may have more runs than a backend takes."""
        tiles = self._tiles_for(work)
        if tiles is None:
            return InParts(self._metadata, list(self._passes(work.runs)))
        return InTiles(tiles, {heads: tiles.queries(work.sequences, heads) for heads in self.kv.query_heads})

    def _passes(self, runs: Sequence[Run]) -> Iterator[Pass]:
        """Cut runs into passes within the limits on tokens and, if a backend computes attention, on runs."""
        room = self.step_tokens
        max_runs = room if self._in_tiles(runs) else self._metadata.max_runs
        batch: list[Run] = []
        for run in runs:
            rest = run
            while rest.tokens:
                is_full = room == 0 or len(batch) == max_runs
                if is_full or (batch and not self.kv.can_share_a_pass(batch[-1], rest)):
                    yield self.kv.make_pass(batch)
                    room, batch = self.step_tokens, []
                if len(rest.tokens) <= room:
                    batch.append(rest)
                    room -= len(rest.tokens)
                    break
                head, rest = rest.split(room)
                batch.append(head)
                room = 0
        if batch:
            yield self.kv.make_pass(batch)

    def _in_tiles(self, runs: Sequence[Run]) -> bool:
        return self._tiles is not None and self._tiles.is_cheaper(runs)

    def _tiles_for(self, work: Pass) -> TileAttention | None:
        """Our own attention, if it is to compute that of a pass."""
        return self._tiles if self._in_tiles(work.runs) or len(work.runs) > self._metadata.max_runs else None

    def _wait_for(self, layer: KVLayer) -> None:
        if self._arrivals is not None:
            self._arrivals.wait(self.kv.index_of[layer.name])

    def _forward(
        self,
        work: Pass,
        shift: int = 0,
        observe: Observer | None = None,
        observed: Collection[int] = (),
        graphs: bool = False,
        hands_on: bool = True,
    ) -> torch.Tensor:
        """Run one pass and return the hidden states behind this rank's last layer, ``[tokens, hidden]``. ``observe``
        is called for the layers ``observed``, numbered as in this rank's entries. With ``graphs``, the pass uses
        vLLM's CUDA graphs if one is large enough: a pass of few tokens spends its time on launching kernels, not on
        running them. ``hands_on``: whether the next pipeline stage, if there is one, waits for the output."""
        count = work.num_tokens
        size = graph_size(self._runner, count) if graphs and self._runs_compiled else None
        padding = 0 if size is None else size - count
        tiles = self._tiles_for(work)
        queries = None
        if tiles is not None:
            queries = {heads: tiles.queries(work.sequences, heads) for heads in self.kv.query_heads}
        positions = work.rotary_positions + shift if shift else work.rotary_positions
        inputs = padded(work.token_ids, padding), padded(positions, padding)

        def attend(
            layer: KVLayer, q: torch.Tensor, k: Any, v: Any, out: torch.Tensor, backend: Callable[[], object]
        ) -> None:
            index = self.kv.index_of[layer.name]
            self._wait_for(layer)  # it may use K and V of another layer
            if observe is not None and index in observed:
                observe(index, q[:count], k[:count], v[:count])
            if tiles is None or queries is None:
                backend()
            else:
                tiles.attend(layer, q[:count], queries[layer.heads], out[:count])

        everywhere = queries is not None or (self._arrivals is not None and self._arrivals.is_pending)
        # Only the layers that need it: between CUDA graphs, every call in Python counts.
        watched = self.kv.kept if everywhere else [self.kv.kept[index] for index in observed]
        with (
            torch.inference_mode(),
            with_adapter(self._runner, work.adapter_id, len(work.sequences), count),
            attention_by(attend, self._wait_for, watched),
        ):
            metadata = self._metadata.build(work) if queries is None else None
            with (
                self._metadata.context(
                    work, metadata, padding=padding, graph=size, skip_compiled=not self._runs_compiled
                ),
                nullcontext(inputs) if size is None else graph_inputs(self._runner, *inputs, count) as (
                    input_ids,
                    places,
                ),
            ):
                with self._entering_model(hands_on):
                    output = self._model(work, input_ids, places)
                    if self._drafter is not None:
                        # Before the next pass: a CUDA graph would overwrite the output.
                        self._draft(self._drafter, work, metadata, positions, output)
                return self._stages.hand_on(output)[:count]

    @contextmanager
    def _entering_model(self, hands_on: bool = True) -> Iterator[None]:
        """Run the model inside the block, on all ranks or on none."""
        self._ranks.go_on()
        try:
            yield
        except Exception as error:
            if isinstance(error, SeenEnough):
                raise
            if self._ranks.per_stage > 1:
                raise RankLostError("the model failed on one of several ranks") from error
            if hands_on:
                self._stages.fail()
            raise

    def _model(self, work: Pass, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The output of the model for a pass, whose ``input_ids`` and ``positions`` may be padded."""
        # The image encoder and the embedding are collective operations if several ranks share the layers.
        embeddings = self._embeddings(work) if work.has_images else None
        return self._runner.model(
            input_ids=input_ids if embeddings is None else None,
            positions=positions,
            intermediate_tensors=self._stages.receive(),
            inputs_embeds=embeddings,
        )

    def _draft(
        self,
        drafter: Drafter,
        work: Pass,
        metadata: dict[str, Any] | None,
        positions: torch.Tensor,
        output: Any,
    ) -> None:
        """Have the draft model compute its KV of a pass, from the model's ``output``. Its compiled code and its CUDA
        graphs are left to vLLM's own steps."""
        with self._metadata.context(work, metadata, padding=0, graph=None, skip_compiled=True):
            drafter.follow(output, work.token_ids, work.following_ids, positions)

    def _embeddings(self, work: Pass) -> torch.Tensor:
        """Embeddings of all tokens of a pass, ``[tokens, hidden]``, made as vLLM makes them."""
        assert self._images is not None
        return self._images.embed(work.token_ids, work.image_rows(), work.is_image)
