"""The connector vLLM loads. It hands each call to one of the two sides."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.compat.cache import served_cache
from kvmosaic.engines.vllm.compat.graphs import asks_for_layers
from kvmosaic.engines.vllm.compat.images import keep_whole
from kvmosaic.engines.vllm.compat.running import quiet_hooks
from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step, do_before_forward, hide_events
from kvmosaic.engines.vllm.messages import StepReport, StepWork
from kvmosaic.engines.vllm.scheduler_side.prefix_events import event_groups
from kvmosaic.engines.vllm.scheduler_side.scheduler import ChunkScheduler
from kvmosaic.engines.vllm.setup import EngineSetup
from kvmosaic.engines.vllm.telemetry.metrics import ChunkPromMetrics, ChunkStats
from kvmosaic.engines.vllm.worker import current_runner
from kvmosaic.engines.vllm.worker_side.side import WorkerSide


class ChunkConnector(KVConnectorBase_V1):
    """Reuses chunks inside vLLM. A request waits until its chunks are in the fastest tier. They are loaded before its
    first forward: in the same step or, if that would delay others for long, slice by slice in the steps before it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches = kv_cache_config
        self._setup = EngineSetup.of(vllm_config, kv_cache_config)
        self._scheduler: ChunkScheduler | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            scheduler = self._scheduler = ChunkScheduler(self._setup)
            if (events := vllm_config.kv_events_config) and events.enable_kv_cache_events:
                scheduler.prefixes.announce(
                    event_groups(served_cache(vllm_config, kv_cache_config), self._setup.shape.window_tail)
                )

    @property
    def scheduler(self) -> ChunkScheduler:
        assert self._scheduler is not None, "only the scheduler's process has this side"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None, "only a worker's process has this side, once its KV cache is there"
        return self._worker

    @property
    def has_worker(self) -> bool:
        """Whether this is a worker's process, and its KV cache is there."""
        return self._worker is not None

    # --- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        hide_events(gpu_block_pool)
        self.scheduler.bind(FreeBlocks(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work = self.scheduler.take_work(Step.of(scheduler_output))
        if work.prefix_saves:  # their blocks may be given to requests of this very step
            do_before_forward(scheduler_output)
        keep_whole(scheduler_output, self.scheduler.features_of)
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.loaded(connector_output.finished_recving or ())
        if (report := connector_output.kv_connector_worker_meta) is not None:
            assert isinstance(report, StepReport)
            self.scheduler.update(report)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.prefixes.take_events()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request)

    def reset_cache(self) -> bool:
        self.scheduler.empty_memory()
        return True

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        runner, device_pool = current_runner()
        if runner is None:
            worker = "--worker-cls kvmosaic.engines.vllm.worker.ChunkWorker"
            raise ConfigError(f"the chunk connector needs its worker; start vLLM with {worker}")
        self._worker = WorkerSide(self._setup, self._vllm_config, self._caches, runner, device_pool)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker.ranks.stages == 1:  # otherwise the worker has already called it
            self.chunk_cache_step(self._get_connector_metadata())
        if not asks_for_layers(forward_context):
            self.worker.wait_for_all()

    def chunk_cache_step(self, work: KVConnectorMetadata) -> None:
        """Do the work of a step that comes before its forward."""
        assert isinstance(work, StepWork)
        if work.engine_id != self._setup.engine_id:
            raise ConfigError("two vLLM engines with a chunk cache in one process; give each a process of its own")
        with quiet_hooks(self):
            self.worker.step(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer's KV that is still arriving from host memory; all other KV is there already."""
        self.worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: chunks are stored when they are filled, never from a request's own KV."""

    def wait_for_save(self) -> None:
        """Wait for all arriving KV, also of layers that the forward did not wait for."""
        if self._worker is not None:
            self._worker.wait_for_all()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker.take_loaded(finished_req_ids) or None

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.take_report()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> ChunkStats | None:
        if self._scheduler is not None:
            return self._scheduler.stats.take()
        return None if self._worker is None else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ChunkStats:
        return ChunkStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ChunkPromMetrics:
        return ChunkPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
