"""The embedded engine: any Hugging Face causal LM in this process. It defines what is exact."""

from kvmosaic.engines.hf.llm import LLM

__all__ = ["LLM"]
