"""One real vLLM engine for the whole module, in this process."""

import importlib.util
import os
import weakref

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("KVMOSAIC_MISS_POLICY", "fill-first")  # for a document in the store after its first request

# vLLM has an environment of its own (`make test-vllm`): it pins libraries the embedded engine leaves open.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*test_*.py"]  # also in folders

# Small blocks, so that these short prompts fill several: only full blocks enter the prefix cache.
SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "disable_log_stats": False,
}

if torch.cuda.is_available():
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # float32 means float32, also in attention
    SMALL["gpu_memory_utilization"] = 0.2  # several engines in one process must fit
    os.environ.setdefault("KVMOSAIC_CHUNK_CACHE_GPU_MEMORY_FRACTION", "0.05")


@pytest.fixture(scope="session", autouse=True)
def one_engine_at_a_time():
    """Engines of this process share vLLM's process groups, and an engine that is collected destroys them. A failed
    test's traceback keeps its engine: collected later, it would take the groups of the next one along. So an engine
    ends when the next one starts."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine.core_client import InprocClient

    living: weakref.WeakSet[InprocClient] = weakref.WeakSet()
    start = InprocClient.__init__

    def start_alone(self, *args, **kwargs):
        for other in list(living):
            other.shutdown()
        living.clear()
        try:
            start(self, *args, **kwargs)
        except BaseException:  # also a timeout
            cleanup_dist_env_and_memory()
            raise
        living.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InprocClient, "__init__", start_alone)
        yield


@pytest.fixture(scope="module")
def llm():
    from kvmosaic.vllm import LLM

    return LLM("smollm2-135m", enable_chunk_cache=True, **SMALL)


@pytest.fixture
def passes(llm, monkeypatch):
    """Runs in each pass of the sparse forward from now on, all of them through the backend."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    forward = get_kv_transfer_group().loader._forward
    counts, compute = [], forward._forward

    def counted(rows, *args, **kwargs):
        counts.append(len(rows))
        return compute(rows, *args, **kwargs)

    monkeypatch.setattr(forward, "_forward", counted)
    monkeypatch.setattr(forward, "_in_tiles", lambda rows: False)
    return counts
