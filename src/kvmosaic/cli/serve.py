"""``kvmosaic serve``: ``vllm serve`` with a chunk cache."""

import os
from importlib import import_module
from typing import Annotated, Any

import typer

from kvmosaic.cli.setting_options import takes_settings
from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError


@takes_settings
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Model to serve: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    chunk_admin_key: Annotated[
        str | None,
        typer.Option(
            help="Refused on the command line: set KVMOSAIC_CHUNK_ADMIN_KEY to open the admin API at /kvmosaic/, see "
            "docs/reference/http.md."
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Start vLLM's OpenAI-compatible server with a chunk cache. Settings may also come from environment variables
    (KVMOSAIC_ and the name in capitals) or a YAML file. All other options are passed to vllm serve."""
    given = {"chunk_admin_key": chunk_admin_key, **settings}
    config = load_config(model, **{name: value for name, value in given.items() if value is not None})
    check_settings(config)
    try:
        import_module("kvmosaic.vllm")  # without vLLM, the error says how to install it
        from kvmosaic.engines.vllm.compat.server import ServeCommand
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from kvmosaic.engines.vllm.arguments import can_be_used, refuse_unsupported, served_dtype
    from kvmosaic.engines.vllm.command_line import server_options
    from kvmosaic.models import CATALOG, resolve

    if config.enable_chunk_cache and not can_be_used():
        config = config.model_copy(update={"enable_chunk_cache": False})
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    command = ServeCommand()
    parsed = server_options(command, resolve(model), context.args, config)
    if model in CATALOG and not parsed.served_model_name:  # clients should not have to know the folder
        parsed.served_model_name = [model]
    parsed.dtype = served_dtype(command.engine_args(parsed))
    if config.enable_chunk_cache:
        refuse_unsupported(command.engine_args(parsed))
    command.run(parsed)


def check_settings(config: ChunkCacheConfig) -> None:
    """Raise :class:`ConfigError`, with one line, if a server cannot start with these settings."""
    if config.chunk_page and ADMIN_KEY_VARIABLE not in os.environ:
        raise ConfigError(f"chunk_page: the page is shown with an admin key only; set {ADMIN_KEY_VARIABLE}")
    from kvmosaic.blend import policy_named  # importing it takes seconds

    try:
        policy_named(config.policy)
    except ConfigError as error:
        raise config.blame(error) from None
