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
    model: Annotated[
        str,
        typer.Argument(
            help="Model to serve: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    enable_chunk_cache: Annotated[
        bool | None,
        typer.Option("--enable-chunk-cache", help="Reuse the KV cache of documents at any position in a prompt."),
    ] = None,
    chunk_separator: Annotated[
        str | None,
        typer.Option(
            help="Text that splits prompts into chunks; `kvmosaic separator` makes a safe one. Documents that "
            "requests name need no separator."
        ),
    ] = None,
    min_chunk_tokens: Annotated[int | None, typer.Option(help="Minimum length of a stored chunk, in tokens.")] = None,
    chunk_sources: Annotated[
        str | None,
        typer.Option(
            help="Parts of a request that are reused as documents, besides the documents it names: none, all, or "
            "some of 'documents,parts,tools,auto'."
        ),
    ] = None,
    client_parameters: Annotated[
        str | None,
        typer.Option(help="Chunk-cache parameters that requests may set: all, none, or names like 'policy,report'."),
    ] = None,
    chunk_hash_algorithm: Annotated[
        str | None, typer.Option(help="Hash function for the content of chunks: xxhash or sha256.")
    ] = None,
    chunk_cache_gpu_memory_fraction: Annotated[
        float | None, typer.Option(help="Share of GPU memory for stored chunks, from 0 to below 1.")
    ] = None,
    recompute_ratio: Annotated[
        float | None, typer.Option(help="Share of reused chunk tokens to recompute: 0 for none, 1 for all (exact).")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy that chooses which reused tokens to recompute, like composite or 'sink-link(k=8)'."
        ),
    ] = None,
    sink_prefix: Annotated[
        str | None,
        typer.Option(
            help="Prefix that precedes every chunk when its KV is computed: bos, none, document, learned:FILE, or a "
            "literal text."
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Maximum host memory for stored KV in each worker process, like 8GiB.")
    ] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Directory in which KV is stored on disk.")] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="URL of a KV store on other machines, shared by engines: valkey://host:6379/0 or "
            "mooncake://host:50051."
        ),
    ] = None,
    per_head_storage: Annotated[
        bool | None,
        typer.Option(
            "--per-head-storage",
            help="Store each KV head separately in the remote store, so that engines of any tensor-parallel size can "
            "share it.",
        ),
    ] = None,
    prefix_blocks: Annotated[
        bool | None,
        typer.Option(
            "--prefix-blocks",
            help="Also store the exact KV of prompts and answers without chunks, for prompts that begin with "
            "the same tokens.",
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Name of the tenant that owns the stored KV; tenants never share KV.")
    ] = None,
    chunk_admin_key: Annotated[
        str | None,
        typer.Option(
            help="Refused on the command line: set KVMOSAIC_CHUNK_ADMIN_KEY to open the admin API at /kvmosaic/, see "
            "docs/usage.md."
        ),
    ] = None,
) -> None:
    """Start vLLM's OpenAI-compatible server with a chunk cache. All other options are passed to ``vllm serve``."""
    settings = {name: value for name, value in context.params.items() if name != "model" and value is not None}
    config = load_config(model, **settings)
    from kvmosaic.blend import policy_named  # importing it takes seconds

    try:
        policy_named(config.policy)
    except ConfigError as error:
        raise config.blame(error) from None
    try:
        import_module("kvmosaic.vllm")  # without vLLM, the error says how to install it
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
