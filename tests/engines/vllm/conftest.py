"""Real vLLM engines, one at a time in this process, with models that are as small as possible."""

import gc
import importlib.util
import os
import weakref

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.pop("KVMOSAIC_MISS_POLICY", None)

# vLLM has an environment of its own (`make test-vllm`): it pins libraries the embedded engine leaves open.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*test_*.py"]  # also in folders

if torch.cuda.is_available():
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # float32 means float32, also in attention
    os.environ.setdefault("KVMOSAIC_CHUNK_CACHE_GPU_MEMORY_FRACTION", "0.05")


@pytest.fixture(scope="session", autouse=True)
def quick_inspection():
    """vLLM inspects a model's class in a separate process, which imports vLLM again, so that CUDA is not initialised
    here. Without CUDA, the inspection may run in this process."""
    if torch.cuda.is_available() or not importlib.util.find_spec("vllm"):
        yield
        return
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session", autouse=True)
def one_engine_at_a_time():
    """Engines of this process share vLLM's connector and process groups, and an engine that is collected destroys
    them. A failed test's traceback keeps its engine alive. If that was collected later, it would destroy the groups
    of the next engine. So an engine ends when the next one starts."""
    if not importlib.util.find_spec("vllm"):
        yield
        return
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.v1.engine.core_client import InprocClient

    living: weakref.WeakSet[InprocClient] = weakref.WeakSet()
    start = InprocClient.__init__

    def start_alone(self, *args, **kwargs):
        for other in list(living):
            other.shutdown()
        living.clear()
        if torch.cuda.is_available():  # vLLM does not start if memory comes back while it measures its own
            gc.collect()
            torch.cuda.empty_cache()
        try:
            start(self, *args, **kwargs)
        except BaseException:  # also a timeout
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        living.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InprocClient, "__init__", start_alone)
        yield


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """Requests wait for slower tiers as long as they may: the disk of a busy machine can be slower than a tiny
    model's prefill."""
    if request.node.get_closest_marker("engine"):
        from tests.engines.vllm.helpers import set_patience

        set_patience(monkeypatch, 30.0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A tiny Llama without a tokenizer, so prompts are tokens."""
    from tests.engines.vllm.tiny import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory):
    """A tiny Gemma with sliding windows, without a tokenizer."""
    from tests.engines.vllm.tiny import WINDOW, write_tiny_gemma

    return write_tiny_gemma(tmp_path_factory.mktemp("models") / "gemma", WINDOW)


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory):
    """A tiny DeepSeek with a latent that all heads share, without a tokenizer."""
    from tests.engines.vllm.tiny import write_tiny_deepseek

    return write_tiny_deepseek(tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory):
    """A tiny Qwen3 with a mixture of experts, without a tokenizer."""
    from tests.engines.vllm.tiny import write_tiny_mixture

    return write_tiny_mixture(tmp_path_factory.mktemp("models") / "mixture")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory, smollm2_folder):
    """A tiny model with SmolLM2's tokenizer, and enough layers for every policy."""
    from tests.engines.vllm.tiny import write_tiny_text

    return write_tiny_text(tmp_path_factory.mktemp("models") / "text", smollm2_folder)


@pytest.fixture
def passes(llm, monkeypatch):
    """Runs of each pass of the sparse forward from now on. All go through the backend."""
    from tests.engines.vllm.helpers import note_passes

    return note_passes(monkeypatch)
