"""``from kvmosaic.vllm import LLM``: vLLM's own class, with a chunk cache."""

from kvmosaic.engines.vllm.llm import LLM

__all__ = ["LLM"]
