"""The production engine: unmodified vLLM, extended through its own connector and worker interfaces."""
