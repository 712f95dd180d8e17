"""``from kvmosaic.hf import LLM``: the embedded engine."""

from kvmosaic.engines.hf import LLM
from kvmosaic.engines.results import ChunkReport, RequestOutput

__all__ = ["LLM", "ChunkReport", "RequestOutput"]
