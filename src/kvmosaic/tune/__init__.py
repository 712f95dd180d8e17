"""Learns what chunks are computed after, so that reused chunks answer like a full prefill."""
