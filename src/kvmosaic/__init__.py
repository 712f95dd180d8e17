"""kvmosaic: computes the KV cache of a document once and reuses it at any position in any prompt."""

__version__ = "0.2.0.dev0"
