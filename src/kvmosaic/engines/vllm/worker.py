"""``worker_cls``: vLLM's own worker, which also tells the connector where the model is.

vLLM hands a connector the paged KV cache but not the model; filling and blending need both.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvmosaic.core.accelerator import accelerator_of
from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.arguments import CONNECTOR
from kvmosaic.engines.vllm.compat.cache import keeping_all_tokens
from kvmosaic.engines.vllm.compat.running import make_stage_inputs
from kvmosaic.engines.vllm.compat.weights import CHANGING, watch_calls
from kvmosaic.engines.vllm.forward.graph_trial import plan_larger_graphs, try_larger_graphs

if TYPE_CHECKING:
    from kvmosaic.engines.vllm.worker_side.side import WorkerSide

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.device_type == "npu":
    from vllm_ascend.worker.worker import NPUWorker as PlatformWorker  # type: ignore[no-redef]
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[assignment]

_runner: Any = None
_device_pool: torch.Tensor | None = None


def current_runner() -> tuple[Any, torch.Tensor | None]:
    """The model runner of this process's worker and its device pool; ``None`` when vLLM runs another worker."""
    return _runner, _device_pool


class ChunkWorker(PlatformWorker):  # type: ignore[misc, valid-type]
    """vLLM's worker for this platform, noting its model runner once the model is loaded."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        global _runner, _device_pool
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            found = "none" if transfer is None else transfer.kv_connector
            raise ConfigError(
                f"worker_cls={type(self).__name__} needs the connector {CONNECTOR}, and vLLM has {found}; leave out "
                "worker_cls, or kv_offloading_size and other connectors"
            )
        # vLLM keeps its connector in a global. The connector of an earlier engine in this process would be mistaken
        # for ours.
        ensure_kv_transfer_shutdown()
        super().load_model(*args, **kwargs)
        _runner, _device_pool = self.model_runner, None
        make_stage_inputs(self.model_runner)
        assert self.device is not None
        config = load_config(**transfer.kv_connector_extra_config)
        accelerator = accelerator_of(self.device)
        if accelerator is not None and config.chunk_cache_gpu_memory_fraction > 0:
            total = accelerator.get_device_properties(self.device).total_memory
            # Allocated before vLLM measures the memory left for its own cache, so that vLLM accounts for the pool.
            size = int(total * config.chunk_cache_gpu_memory_fraction)
            _device_pool = torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.device.type == "npu":
                # vllm-ascend 0.23 counts what loading the model took, and nothing that is allocated after it.
                self.model_runner.model_memory_usage += size

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return keeping_all_tokens(super().get_kv_cache_spec())

    def compile_or_warm_up_model(self) -> Any:
        side = _worker_side()
        plan_larger_graphs(self.model_runner, side.ranks)
        result = super().compile_or_warm_up_model()
        try_larger_graphs(side.forward, self.model_runner, side.ranks)
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step. With pipeline stages, the connector's work comes before all else: vLLM's worker waits for
        hidden states before it asks the connector, and would take ours for those of the step."""
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            connector: Any = get_kv_transfer_group()
            connector.chunk_cache_step(scheduler_output.kv_connector_metadata)
        return super().execute_model(scheduler_output)

    def chunk_cache_warm_states(self, chunks: list[list[int]]) -> list[str]:
        """For each document: ``kept``, ``missing``, ``too-long`` or ``too-short``."""
        return list(_worker_side().cache.warm_states(chunks))

    def chunk_cache_documents(self, most: int, shows_text: bool) -> dict[str, Any]:
        """Totals of the stored entries, and a list of the newest ``most``; ``shows_text``: with their first
        tokens."""
        return _worker_side().documents.listed(most, shows_text=shows_text)

    def chunk_cache_holds(self, digest: str) -> bool:
        """Whether an entry is stored, by the hexadecimal digits of its content hash."""
        return bool(_worker_side().documents.keys(digest))

    def chunk_cache_pin(self, digest: str, is_pinned: bool) -> int:
        """Protect the entries of a content hash from eviction, or stop protecting them. Returns their number."""
        return _worker_side().documents.pin(digest, is_pinned=is_pinned)

    def chunk_cache_delete(self, digest: str) -> int:
        """Delete the entries of a content hash. Returns their number."""
        return _worker_side().documents.delete(digest)

    def chunk_cache_clear(self) -> None:
        """Delete all entries of this model and tenant."""
        _worker_side().clear()

    def chunk_cache_stats(self) -> dict[str, Any]:
        """Statistics of this worker's chunk cache."""
        side = _worker_side()
        about = {"off_reason": side.off_reason, "max_stored_tokens": side.cache.max_stored_tokens}
        return {**side.cache.get_stats(), **about}


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's method so that weights are checked again after it."""

    @wraps(method)
    def watched(self: ChunkWorker, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _check_weights()

    return watched


def _check_weights() -> None:
    """Have the weights checked again before the next use of KV."""
    connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    if getattr(connector, "has_worker", False):  # otherwise they are checked when it starts
        connector.worker.weights.may_have_changed()


for _name in CHANGING:
    if hasattr(PlatformWorker, _name):  # releases differ
        setattr(ChunkWorker, _name, _watched(getattr(PlatformWorker, _name)))


watch_calls(_check_weights)


def _worker_side() -> "WorkerSide":
    connector: Any = get_kv_transfer_group()
    side: WorkerSide = connector.worker
    return side
