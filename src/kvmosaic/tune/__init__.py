"""Learns a sink prefix for chunks, so that answers from reused chunks come closer to a full prefill."""
