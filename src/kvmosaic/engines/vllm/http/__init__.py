"""The HTTP side: names documents in requests to vLLM's server, and reports on them to clients."""
