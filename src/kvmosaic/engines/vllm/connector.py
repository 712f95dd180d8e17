"""The connector vLLM loads: scheduler side and worker side of the chunk cache."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.sink import sink_tokens
from kvmosaic.core.window import WHOLE, WindowTails, reachable_tail
from kvmosaic.engines.self_test import OFF
from kvmosaic.engines.vllm.compat import (
    asks_for_layers,
    do_before_forward,
    hash_block_size,
    sliding_window,
    unsupported_cache,
)
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.rotary import ANY_LENGTH
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.messages import StepReport, StepWork
from kvmosaic.engines.vllm.paged.by_kernel import KernelBlocks
from kvmosaic.engines.vllm.parameters import looks_inside, policy_served
from kvmosaic.engines.vllm.scheduler_side.prefix import part_tokens
from kvmosaic.engines.vllm.scheduler_side.prefix_events import PrefixEvents, event_groups
from kvmosaic.engines.vllm.scheduler_side.scheduler import ChunkScheduler
from kvmosaic.engines.vllm.support import unsupported
from kvmosaic.engines.vllm.telemetry.metrics import ChunkPromMetrics, ChunkStats
from kvmosaic.engines.vllm.worker import current_runner
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher
from kvmosaic.engines.vllm.worker_side.loader import ChunkLoader
from kvmosaic.engines.vllm.worker_side.self_test import self_test
from kvmosaic.models.digest import weights_digest

logger = init_logger(f"vllm.{__name__}")
"""Under vLLM's own, whose prefix, level and handlers it so has."""


class ChunkConnector(KVConnectorBase_V1):
    """Reuses chunks inside vLLM. A request whose chunks are in slower tiers waits until they are in the fastest one,
    while others run; then everything is loaded before its first forward: in the same step, or, if that would keep
    others waiting for long, slice by slice in those before it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        problems = unsupported(vllm_config) or unsupported_cache(kv_cache_config)
        if problems:
            raise UnsupportedModelError(f"the chunk cache cannot be used here: {problems[0]}")
        # Our front ends give all settings; the profile is for a plain ``vllm serve``.
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._config: ChunkCacheConfig = load_config(vllm_config.model_config.model, **given)
        num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        try:
            policy_served(self._config.policy, num_layers)
        except ConfigError as error:
            raise self._config.blame(error) from None
        self._caches = kv_cache_config
        self._reach = self._window_reach()
        self._tail = self._reach if self._cuts_windows() else None
        self._tokenizer = _tokenizer(vllm_config)
        self._parser = ChunkTokenParser(self._tokenizer, self._config.chunk_separator)
        self.scheduler: ChunkScheduler | None = None
        self.loader: ChunkLoader | None = None
        self.fetcher: ChunkFetcher | None = None
        self._events: PrefixEvents | None = None
        self._has_reported = False
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = ChunkScheduler(
                self._config,
                self._parser,
                tuple(self._sink()),
                kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                hash_block_size(vllm_config, kv_cache_config),
                vllm_config.parallel_config.tensor_parallel_size,
                vllm_config.kv_transfer_config.engine_id,
                vllm_config.scheduler_config.max_num_batched_tokens,
                num_layers,
                vllm_config.model_config.max_model_len,
                vllm_config.speculative_config is not None,
                part_tokens(self._reach),
                self._tail,
            )
            wanted = vllm_config.kv_events_config
            if wanted is not None and wanted.enable_kv_cache_events:
                self._events = self.scheduler.announce(event_groups(kv_cache_config, self._tail))

    # --- scheduler side

    def on_new_request(self, request: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.add(request)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        work = self.scheduler.take_work(scheduler_output)
        if work.prefix_saves:  # their blocks may be given to requests of this very step
            do_before_forward(scheduler_output)
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.loaded(connector_output.finished_recving or ())
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, StepReport)
            self.scheduler.update(report)
            if self._events is not None:
                self._events.update({digest for rank in report.ranks for digest in rank.changes})

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        return False, self.scheduler.finished(request)

    def reset_cache(self) -> bool:
        assert self.scheduler is not None
        self.scheduler.clear()
        return True

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        runner, device_pool = current_runner()
        if runner is None:
            raise ConfigError(
                "the chunk connector needs its worker; start vLLM with "
                "--worker-cls kvmosaic.engines.vllm.worker.ChunkWorker"
            )
        model = self._vllm_config.model_config
        forward = SparseForward(self._vllm_config, runner, self._caches)
        ranks, sink = Ranks(model, len(forward.layers)), self._sink()
        config = model.hf_text_config.to_dict()
        identity = {
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "revision": model.revision,
            # Less what depends on where it lies and who reads it.
            "config": {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")},
            "weights": ranks.first(weights_digest(model.model, model.revision) if ranks.rank == 0 else None),
        }
        self.loader = ChunkLoader(
            self._config,
            # The same wherever its folder is. A name on the hub is one with its owner.
            Path(model.model).name if Path(model.model).exists() else model.model,
            identity,
            sink,
            self._parser,
            forward,
            runner.model,
            device_pool,
            ranks,
            model.max_model_len,
            self._caches.num_blocks,
            WHOLE if self._tail is None else WindowTails(forward.windowed_layers, self._tail),
        )
        self.fetcher = ChunkFetcher(self.loader.cache.store)
        if self._config.self_test:
            self.loader.off_reason = self_test(
                model, sink, self._config.chunk_context, forward, self.loader._blocks, ranks
            )
        if ranks.rank == 0 and self.loader.off_reason is not None:
            logger.error(OFF, self.loader.off_reason)
        elif ranks.rank == 0:
            budgets = {
                "device": 0 if device_pool is None else device_pool.nbytes,
                "host": self._config.host_memory,
                "disk": self._config.disk_budget,
            }
            held = self.loader.cache.store.held()  # a disk that cannot be used has no tier
            tiers = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in budgets.items() if name in held)
            tiers += f", remote {self._config.remote}" if self._config.remote else ""
            tiers += " head by head" if self._config.remote and self._config.per_head_storage else ""
            writer = "kvmosaic's kernel" if isinstance(self.loader._blocks, KernelBlocks) else "the backend's writer"
            logger.info("chunk cache on for %s: %s; chunks placed by %s", model.served_model_name, tiers, writer)
            if self._config.prefix_blocks and not self.loader._blocks.can_read:
                logger.warning("prefix_blocks: this attention backend's cache cannot be read back; none are stored")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        if work.engine_id != self._vllm_config.kv_transfer_config.engine_id:
            raise ConfigError("two vLLM engines with a chunk cache in one process; give each a process of its own")
        assert self.loader is not None
        assert self.fetcher is not None
        if work.is_empty and not self.loader.slices:
            return
        cache = self.loader.cache
        self.loader.prefixes.save(work.prefix_saves)  # first: whatever comes now may write to the same blocks
        if work.clear:
            self.loader.clear()
        for request_id in work.released:
            self.fetcher.release(request_id)
        for fetch in work.fetches:
            self.fetcher.start(fetch.request_id, [cache.key_of_hash(*chunk, ANY_LENGTH) for chunk in fetch.chunks])
        # Without metadata vLLM's per-layer hooks stay quiet while we run forwards of our own.
        self._connector_metadata = None
        try:
            for prefix in work.prefix_loads:
                self.loader.prefixes.load(prefix)
                self.fetcher.release(prefix.request_id)
            self.loader.load(work.loads)
            for load in work.loads:
                self.fetcher.release(load.request_id)
            self.loader.fill_in_background(work.fills)
        finally:
            self._connector_metadata = work
            # A graph of whole steps asks for no layers one by one; nor do steps that compute nothing.
            if not asks_for_layers(forward_context):
                self.loader.wait_for_all()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self.loader is not None
        return None, self.loader.slices.take_done(finished_req_ids) or None

    def build_connector_worker_meta(self) -> StepReport | None:
        assert self.loader is not None
        assert self.fetcher is not None
        # In this order: whoever hears that a fetch is over has to hear of what it brought.
        fetched = self.fetcher.take_finished()
        changes = self.loader.cache.take_changes(ANY_LENGTH)
        has_measured = self.loader.timer.take_news()
        if self._has_reported and not changes and not fetched and not has_measured:
            return None
        self._has_reported = True
        for seconds in fetched.values():
            self.loader.stats.observe("fetch", seconds)
        return StepReport([self.loader.report(changes, list(fetched))])

    def get_kv_connector_stats(self) -> ChunkStats | None:
        if self.scheduler is not None:
            return self.scheduler.stats.take()
        return None if self.loader is None else self.loader.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ChunkStats:
        return ChunkStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ChunkPromMetrics:
        return ChunkPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """What comes from host memory may still be on its way; all else is there before the forward starts."""
        assert self.loader is not None
        self.loader.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored when they are filled, never from a request's own KV."""

    def wait_for_save(self) -> None:
        """The store writes in the background. What was to arrive has to be there, also if nobody asked for it."""
        if self.loader is not None:
            self.loader.wait_for_all()

    def shutdown(self) -> None:
        if self.fetcher is not None:
            self.fetcher.close()
        if self.loader is not None:
            self.loader.cache.close()

    def _window_reach(self) -> int | None:
        """How many tokens of an entry are seen from behind it in layers with a sliding window, if there are any."""
        window = sliding_window(self._caches)
        if window is None:
            return None
        block_size = self._caches.kv_cache_groups[0].kv_cache_spec.block_size
        # A draft model begins a token before the boundary, and so a block before it.
        return reachable_tail(window, block_size, int(self._vllm_config.speculative_config is not None))

    def _cuts_windows(self) -> bool:
        """Whether entries keep no more than that."""
        return self._config.window_tails and not looks_inside(self._config.policy, self._config.recompute_ratio)

    def _sink(self) -> list[int]:
        bos = self._vllm_config.model_config.hf_text_config.bos_token_id
        encode = None if self._tokenizer is None else partial(self._tokenizer.encode, add_special_tokens=False)
        return sink_tokens(self._config.sink_prefix, self._config.chunk_separator, bos, encode)


def _tokenizer(vllm_config: Any) -> Any:
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
