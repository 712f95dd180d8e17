"""The sparse forward: any tokens of paged sequences through vLLM's own model."""
