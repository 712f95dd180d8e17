"""The worker's side as a whole: its parts, the order of a step, its reports."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.window import WHOLE, WindowTails
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.identity import model_name
from kvmosaic.engines.self_test import OFF
from kvmosaic.engines.vllm.compat.images import ImageModel
from kvmosaic.engines.vllm.compat.weights import loaded_model
from kvmosaic.engines.vllm.forward.ascend_metadata import AscendMetadataBuilder
from kvmosaic.engines.vllm.forward.drafts import draft_identity, keep_drafts
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.layer_arrivals import LayerArrivals
from kvmosaic.engines.vllm.forward.metadata import VllmMetadataBuilder
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.rotary import measure_rotary
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.forward.tile_attention import TileAttention
from kvmosaic.engines.vllm.messages import RankReport, StepReport, StepWork
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.paged.by_backend import BackendBlocks
from kvmosaic.engines.vllm.paged.by_kernel import KernelBlocks, readable_caches
from kvmosaic.engines.vllm.paged.pair_reader import block_reader
from kvmosaic.engines.vllm.setup import EngineSetup
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.adapters import LoadedAdapters
from kvmosaic.engines.vllm.worker_side.blender import Blender
from kvmosaic.engines.vllm.worker_side.bringer import Bringer
from kvmosaic.engines.vllm.worker_side.documents import StoredDocuments
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher, FetchEnd
from kvmosaic.engines.vllm.worker_side.filler import ChunkFiller
from kvmosaic.engines.vllm.worker_side.images import LoadImages
from kvmosaic.engines.vllm.worker_side.loader import ChunkLoader
from kvmosaic.engines.vllm.worker_side.names import EntryNames, identity
from kvmosaic.engines.vllm.worker_side.narrower import Narrower
from kvmosaic.engines.vllm.worker_side.prefix import PrefixLoader
from kvmosaic.engines.vllm.worker_side.self_test import self_test
from kvmosaic.engines.vllm.worker_side.sink import sink_entry
from kvmosaic.engines.vllm.worker_side.store_stats import StoreStats
from kvmosaic.engines.vllm.worker_side.tiers import say_what_is_on
from kvmosaic.engines.vllm.worker_side.weights import EngineWeights

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


class WorkerSide:
    """One rank. It is created when vLLM's KV cache exists and no block of it is in use yet."""

    def __init__(
        self,
        setup: EngineSetup,
        vllm_config: Any,
        kv_cache_config: Any,
        runner: Any,
        device_pool: torch.Tensor | None,
    ) -> None:
        """``runner`` is vLLM's model runner; ``device_pool`` memory of the GPU, ``[bytes]``, for the fastest tier."""
        self._setup = setup
        self._model = vllm_config.model_config
        kv = KVLayers(vllm_config, kv_cache_config, runner)
        builder = VllmMetadataBuilder if kv.pairs is None else AscendMetadataBuilder
        metadata = builder(vllm_config, kv_cache_config, runner)
        drafter = keep_drafts(vllm_config, runner, kv, metadata)
        self.ranks = Ranks(self._model, len(kv), len(kv.drafts))
        self.stats = ChunkStats(rank=self.ranks.rank)
        self.timer = StageTimer(self.stats, kv.device)
        # If our kernels can read the cache, entries are copied beside the engine's stream, and tiles can be used.
        caches = readable_caches(kv)
        tiles = None
        self._arrivals: LayerArrivals | None = None
        if caches is not None:
            self._arrivals = LayerArrivals(caches.layers)
        if caches is not None and self.ranks.stages == 1:  # stages may differ in what they support
            tiles = TileAttention.measure(kv, metadata, self.ranks, self._model.max_model_len)
        model = ImageModel(runner) if setup.shape.reads_images else None
        images = LoadImages(model)
        self.forward = SparseForward(
            vllm_config,
            runner,
            kv,
            metadata,
            ranks=self.ranks,
            arrivals=self._arrivals,
            tiles=tiles,
            images=model,
            drafter=drafter,
        )
        models = [runner.model] if drafter is None else [runner.model, drafter.model]
        self.rotary = measure_rotary(self.forward, models, self.ranks.layers.start)
        """Rotation of the keys of each layer in entries."""
        tail = setup.shape.window_tail
        kv_format = kv.format(self._model.dtype, WHOLE if tail is None else WindowTails(kv.windowed, tail))
        paged: RequestBlocks | None = None
        if caches is not None and self._arrivals is not None:
            paged = KernelBlocks.open(self.forward, caches, self._arrivals, self.rotary, kv_format)
        self.paged: RequestBlocks = paged or BackendBlocks(
            self.forward,
            self.rotary,
            kv_format,
            block_reader(kv, kv_format.dtype) if setup.config.prefix_blocks else None,
        )
        self.weights = EngineWeights(vllm_config, loaded_model(runner), self.ranks)
        made_by = identity(self._model, self.ranks, self.rotary[: len(kv)], kv)
        if drafter is not None:
            made_by["drafts"] = draft_identity(vllm_config, drafter, self.ranks)
        self.names = EntryNames(setup.config, self.weights, made_by, is_first=self.ranks.rank == 0)
        sink = None
        if setup.learned is not None:  # before the store is opened: the sink may be another model's
            sink = sink_entry(setup.learned, self._model, self.forward, self.ranks, kv_format, setup.draft_sink)
        self.cache = self._open_cache(device_pool, kv_format)
        self.blender = Blender(self.forward, self.paged, self.ranks, self.timer, images)
        self.fetcher = ChunkFetcher(self.cache.store)
        self.documents = StoredDocuments(self.cache, self.fetcher)
        self.adapters = LoadedAdapters(runner, self.ranks)
        self._filler = ChunkFiller(
            self.cache, self.paged, setup.shape, self.ranks, self.timer, self.stats, self.adapters, images, sink
        )
        bringer = Bringer(
            self.cache,
            self.fetcher,
            self.paged,
            self._filler,
            kv.block_sizes,
            images,
            ranks=self.ranks,
            timer=self.timer,
            stats=self.stats,
        )
        self.narrower = Narrower(
            self.forward, loaded_model(runner), self._model.get_vocab_size(), self.ranks, self.timer
        )
        self.loader = ChunkLoader(
            self.cache,
            self.paged,
            self.ranks,
            bringer,
            self.blender,
            self.narrower,
            self.adapters,
            images,
            timer=self.timer,
            stats=self.stats,
        )
        self.prefixes = PrefixLoader(self.cache, self.fetcher, self.paged, self.ranks, self.timer, self.stats)
        self._store_stats = StoreStats(self.cache.store, self.stats)
        self._tells_all = True
        """Whether the next report has to list all stored entries: the scheduler knows none, or outdated ones."""
        self._fetched: dict[str, FetchEnd] = {}
        """Fetches that are over but not reported to the scheduler yet, by request."""
        self.off_reason: str | None = None
        """Why nothing may be reused, if so. The scheduler is told, and hands out no work."""
        self.forward.warm_up()
        if setup.config.self_test:
            self.off_reason = self_test(
                self._model,
                setup.sink,
                setup.config.chunk_context,
                self.forward,
                self.paged,
                self.ranks,
                is_sink_placed=sink is not None,
                is_int8=self.cache.document_format.is_int8,
            )
        if self.off_reason is not None and self.ranks.rank == 0:
            logger.error(OFF, self.off_reason)
        elif self.ranks.rank == 0:
            say_what_is_on(vllm_config, self.names.config, self.cache.store, device_pool, self.paged)

    def step(self, work: StepWork) -> None:
        """Do what the scheduler planned for a step, before the step's own forward."""
        self.adapters.look()  # vLLM has loaded those of the step by now
        if work.is_empty and not self.loader.slices:
            return
        if self.names.have_changed():
            self.blender.clear()
            self._filler.forget()
            self.documents.let_go_of_outdated()
            self._tells_all = True
        # Work that was planned before the scheduler knew of new weights may rely on KV of the old ones.
        is_stale = work.weights != self.weights.changes
        is_closed = self.names.tiers == "none"
        if work.empties_memory:
            self._do_forget(self.cache.empty_memory)
            self._tells_all = True  # slower tiers may still have entries
        if not is_stale and not is_closed:
            self.prefixes.save(work.prefix_saves)  # before everything that may write to the same blocks
        for missed in work.missed:
            reason = self.cache.store.note_miss(self.cache.key_of_hash(*missed))
            self.stats.count_alike("chunk_misses", reason)
        for request_id in work.released:
            self.fetcher.release(request_id)
        for fetch in work.fetches:
            if is_closed:  # the scheduler does not know this yet
                self._fetched[fetch.request_id] = FetchEnd(0.0, frozenset(digest for digest, _ in fetch.chunks), {})
                continue
            keys = [self.cache.key_of_hash(*chunk, is_exact=fetch.is_exact) for chunk in fetch.chunks]
            self.fetcher.start(fetch.request_id, keys)
        for prefix in work.prefix_loads:
            self.prefixes.load(prefix)
            self.fetcher.release(prefix.request_id)
        loads = [replace(load, is_findable=False) for load in work.loads] if is_stale else work.loads
        self.loader.load(loads, work.slice_tokens)
        for load in work.loads:
            self.fetcher.release(load.request_id)
        self._filler.fill_in_background(work.fills, work.fill_slice, can_store=not is_closed)

    def clear(self) -> None:
        """Delete all entries of this model and tenant, from every tier."""
        self.fetcher.clear()
        self._do_forget(self.cache.clear)

    def _do_forget(self, forget: Callable[[], None]) -> None:
        self.blender.clear()
        try:
            forget()
        except Exception:  # entries that are left are still valid
            logger.exception("could not forget all chunks")
            self.stats.failed("clear")

    def wait_for_layer(self, name: str) -> None:
        """Make the GPU wait for entries that are being copied into a layer."""
        layer = self.forward.kv.index_of.get(name)
        if self._arrivals is None or layer is None:
            return
        self._arrivals.wait(layer)
        if layer == len(self.forward.kv) - 1:
            self._arrivals.wait_for_all()  # a CUDA graph of a draft model asks for none of its layers

    def wait_for_all(self) -> None:
        """Make the GPU wait for entries that are being copied into any layer."""
        if self._arrivals is not None:
            self._arrivals.wait_for_all()

    def take_loaded(self, finished: Collection[str]) -> set[str]:
        """Requests whose last slice was computed since the last call. ``finished`` requests need no further
        slices."""
        return self.loader.slices.take_done(finished)

    def take_report(self) -> StepReport | None:
        """This rank's report to the scheduler, if there is news. The first one lists all stored entries."""
        # Fetches come first: a report that says that a fetch is over has to include the entries that it brought.
        self._fetched |= self.fetcher.take_finished()
        recomputed, self.loader.recomputed = self.loader.recomputed, {}
        adapters, ended_fills = self.adapters.take_news(), self._filler.take_ended()
        try:
            is_all, changes = self._tells_all, self.cache.take_changes()
            has_measured = self.timer.take_news()
            if not (is_all or changes or self._fetched or has_measured or recomputed or adapters or ended_fills):
                return None
            if is_all:
                changes = dict(self.cache.present())
            lines = {str(stage): cost.line() for stage, cost in self.timer.costs.items()}
        except Exception:
            logger.exception("could not report stored entries to the scheduler; the next report lists all of them")
            self.stats.failed("statistics")
            self._tells_all, is_all, changes, lines = True, False, {}, {}
        else:
            self._tells_all = False
        fetched, self._fetched = self._fetched, {}
        for end in fetched.values():
            self.stats.observe("fetch", end.seconds)
        return StepReport(
            [
                RankReport(
                    rank=self.ranks.rank,
                    fastest=self.cache.store.fastest_tier,
                    changes=changes,
                    fetched={name: each.not_brought for name, each in fetched.items()},
                    costs={stage: line for stage, line in lines.items() if line is not None},
                    is_off=self.off_reason is not None,
                    weights=self.weights.changes,
                    weights_digest=self.weights.digest,
                    tiers=self.names.tiers,
                    max_stored_tokens=self.cache.max_stored_tokens,
                    recomputed=recomputed if self.ranks.rank == 0 else {},
                    adapters=adapters,
                    sources={digest: tier for each in fetched.values() for digest, tier in each.sources.items()},
                    # Ranks with the same heads write the same files, so each would take the others for company.
                    has_company=self.cache.store.has_company and self.ranks.share.replicas == 1,
                    cannot_narrow=self.narrower.cannot,
                    ended_fills=ended_fills,
                    is_all=is_all,
                )
            ]
        )

    def take_stats(self) -> ChunkStats | None:
        """Metrics since the last call, if there are any."""
        try:
            self.timer.collect()
            for _ in range(self.fetcher.take_errors()):
                self.stats.failed("fetch")
            self._store_stats.collect()
        except Exception:
            logger.exception("could not collect statistics")
            self.stats.failed("statistics")
        return self.stats.take()

    def close(self) -> None:
        """Finish what is being fetched and written."""
        self.fetcher.close()
        self.cache.close()

    def _open_cache(self, device_pool: torch.Tensor | None, kv_format: KVFormat) -> ChunkCache:
        model, ranks = self._model, self.ranks
        return ChunkCache(
            self.names.config,
            model_name(model.model),
            sink=self._setup.sink,
            learned=self._setup.learned,
            fingerprint=lambda length: self.names.fingerprint,  # vLLM's tables do not depend on a prompt's length
            share=ranks.share,
            max_positions=model.max_model_len,
            kv_format=kv_format,
            device_pool=device_pool,
        )
