"""vLLM has a separate environment (`make test-vllm`)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*test_*.py"]
