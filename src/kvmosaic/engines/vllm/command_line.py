"""Options of ``kvmosaic serve`` → the options that vLLM's server runs with."""

import json
from argparse import Namespace
from collections.abc import Sequence

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.vllm.arguments import MIDDLEWARE, engine_arguments, refuse_replaced
from kvmosaic.engines.vllm.compat.server import ServeCommand


def server_options(command: ServeCommand, model: str, options: Sequence[str], config: ChunkCacheConfig) -> Namespace:
    """The parsed options of ``vllm serve MODEL``, with those of the chunk cache if it is on. ``options`` are the
    user's. Raises :class:`ConfigError`, with one line, if they are wrong or would be replaced by ours."""
    parsed = command.parse(model, options)
    if config.enable_chunk_cache:
        # vLLM's own parser has read them, so every spelling is found, and every file that they may be in.
        refuse_replaced(parsed)
        parsed = command.parse(model, [*options, *_ours(config, parsed)])
    return parsed


def _ours(config: ChunkCacheConfig, parsed: Namespace) -> list[str]:
    arguments = engine_arguments(config)
    transfer = json.dumps(arguments["kv_transfer_config"])
    ours = ["--worker-cls", arguments["worker_cls"], "--kv-transfer-config", transfer]
    return ours if MIDDLEWARE in parsed.middleware else [*ours, "--middleware", MIDDLEWARE]
