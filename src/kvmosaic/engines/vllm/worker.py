"""``worker_cls``: vLLM's own worker, which also tells the connector where the model is.

vLLM hands a connector the paged KV cache but not the model; filling and blending need both.
"""

from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

_runner: Any = None


def current_runner() -> Any:
    """The model runner of this process's worker, or ``None`` when vLLM runs another worker class."""
    return _runner


class ChunkWorker(PlatformWorker):  # type: ignore[misc, valid-type]
    """vLLM's worker for this platform, noting its model runner once the model is loaded."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        global _runner
        super().load_model(*args, **kwargs)
        _runner = self.model_runner

    def chunk_cache_stats(self) -> dict[str, Any]:
        """Statistics of this worker's chunk cache."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().loader.cache.get_stats()
