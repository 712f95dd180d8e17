"""``from kvmosaic.vllm import LLM``: vLLM's own class with a chunk cache. ``ChunkMiddleware`` is for its server."""

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"vLLM is not installed ({error}); in kvmosaic's folder, pip install -e '.[vllm]', or, on a machine without "
        "GPU, make .venv-vllm/.serve and use .venv-vllm/bin/kvmosaic"
    ) from None

from kvmosaic.engines.vllm.http.middleware import ChunkMiddleware
from kvmosaic.engines.vllm.llm import LLM

__all__ = ["LLM", "ChunkMiddleware"]
