"""What vLLM's HTTP server is told of documents, and what its clients are told of them."""
