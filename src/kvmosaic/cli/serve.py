"""``kvmosaic serve``: ``vllm serve`` with a chunk cache."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Catalog name, folder or hub name.")],
    enable_chunk_cache: Annotated[bool | None, typer.Option("--enable-chunk-cache", help="Reuse chunks.")] = None,
    chunk_separator: Annotated[
        str | None,
        typer.Option(help="Text that also splits prompts into chunks; see `kvmosaic separator`."),
    ] = None,
    min_chunk_tokens: Annotated[int | None, typer.Option(help="Tokens of the shortest chunk that is stored.")] = None,
    chunk_sources: Annotated[
        str | None, typer.Option(help="What else are documents: none, all, or some of 'documents,parts,tools,auto'.")
    ] = None,
    client_parameters: Annotated[
        str | None, typer.Option(help="What requests may ask for: all, none, or names like 'policy,report'.")
    ] = None,
    chunk_hash_algorithm: Annotated[str | None, typer.Option(help="xxhash or sha256.")] = None,
    chunk_cache_gpu_memory_fraction: Annotated[float | None, typer.Option(help="Share of GPU memory.")] = None,
    recompute_ratio: Annotated[float | None, typer.Option(help="Share of reused tokens to recompute.")] = None,
    policy: Annotated[str | None, typer.Option(help="Which tokens those are, like 'sink-link(k=8)'.")] = None,
    sink_prefix: Annotated[
        str | None, typer.Option(help="What chunks are computed after: bos, none, document, learned:FILE, a text.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Byte budget of the host tier, like 8GiB.")] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Directory of the disk tier.")] = None,
    remote: Annotated[
        str | None, typer.Option(help="The remote tier: valkey://host:6379/0 or mooncake://host:50051.")
    ] = None,
    per_head_storage: Annotated[
        bool | None,
        typer.Option("--per-head-storage", help="Share the remote tier with other tensor-parallel sizes."),
    ] = None,
    prefix_blocks: Annotated[
        bool | None, typer.Option("--prefix-blocks", help="Also store the KV of ordinary prompts and answers.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose entries these are.")] = None,
    chunk_admin_key: Annotated[
        str | None, typer.Option(help="Not here: KVMOSAIC_CHUNK_ADMIN_KEY opens /kvmosaic/, see docs/usage.md.")
    ] = None,
) -> None:
    """Start vLLM's OpenAI server with a chunk cache. All other options go to ``vllm serve``."""
    settings = {name: value for name, value in context.params.items() if name != "model" and value is not None}
    config = load_config(model, **settings)
    from kvmosaic.blend import policy_named  # which takes seconds

    try:
        policy_named(config.policy)
    except ConfigError as error:
        raise config.blame(error) from None
    try:
        import_module("kvmosaic.vllm")  # where vLLM is missing, it says how to install it
        from kvmosaic.engines.vllm.compat.server import ServeCommand
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from kvmosaic.engines.vllm.arguments import MIDDLEWARE, engine_arguments, refuse_unsupported, served_dtype
    from kvmosaic.models import CATALOG, resolve

    options = list(context.args)
    if config.enable_chunk_cache:
        ours = engine_arguments(config)
        transfer = json.dumps(ours["kv_transfer_config"])
        options += ["--worker-cls", ours["worker_cls"], "--kv-transfer-config", transfer]
        if not any(MIDDLEWARE in option for option in options):
            options += ["--middleware", MIDDLEWARE]
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    command = ServeCommand()
    parsed = command.parse(resolve(model), options)
    if model in CATALOG and not parsed.served_model_name:  # clients should not have to know the folder
        parsed.served_model_name = [model]
    parsed.dtype = served_dtype(command.engine_args(parsed))
    if config.enable_chunk_cache:
        refuse_unsupported(command.engine_args(parsed))
    command.run(parsed)
