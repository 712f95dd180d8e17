"""KV entries in and out of vLLM's paged blocks."""
