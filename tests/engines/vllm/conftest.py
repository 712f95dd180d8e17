"""One real vLLM engine for the whole module, in this process."""

import importlib.util
import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# vLLM has an environment of its own (`make test-vllm`): it pins libraries the embedded engine leaves open.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

# Small blocks, so that these short prompts fill several: only full blocks enter the prefix cache.
SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "disable_log_stats": False,
}


@pytest.fixture(scope="module")
def llm():
    from kvmosaic.vllm import LLM

    return LLM("smollm2-135m", enable_chunk_cache=True, **SMALL)
