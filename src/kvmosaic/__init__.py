"""kvmosaic: a document's KV cache, computed once, used again at any position in any prompt."""

__version__ = "0.1.0"
