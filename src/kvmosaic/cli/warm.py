"""``kvmosaic store warm``: compute and store the KV of a corpus ahead of time."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import Enum
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmosaic.cli.corpus import Document, read_corpus
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, progress_bar
from kvmosaic.cli.remote import reach
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError, PromptError

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.engines.warm import Warmer

AT_ONCE = 16
"""Number of documents that are handed to the engine together; also the step of the progress bar."""


class Engine(str, Enum):
    """The engine that computes the entries, and will serve them."""

    VLLM = "vllm"
    HF = "hf"


def warm(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to serve later: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            help='Documents: text files, .jsonl files with a {"text": …} per line, or folders of both.',
            metavar="FILE...",
        ),
    ],
    engine: Annotated[
        Engine, typer.Option(help="Engine that will serve the documents; it cannot use entries of the other engine.")
    ] = Engine.VLLM,
    dtype: Annotated[
        str, typer.Option(help="Data type of the model; the serving engine has to use the same one.")
    ] = "auto",
    vllm_options: Annotated[
        str | None,
        typer.Option(
            help="Other vLLM options that the serving engine will be started with, like '--tensor-parallel-size 2'."
        ),
    ] = None,
    chunk_separator: Annotated[
        str | None,
        typer.Option(
            help="Text that splits prompts into chunks, the same as for `kvmosaic serve`. Default: none, because "
            "requests name their documents."
        ),
    ] = None,
    sink_prefix: Annotated[
        str | None,
        typer.Option(
            help="Prefix that precedes every chunk when its KV is computed: bos, none, document, learned:FILE, or a "
            "literal text."
        ),
    ] = None,
    entry_dtype: Annotated[
        str | None,
        typer.Option(
            help="Number format of stored documents: auto (the model's own) or int8. The serving engine has to use "
            "the same setting."
        ),
    ] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Directory in which KV is stored on disk.")] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="URL of a KV store on other machines, shared by engines: valkey://host:6379/0 or "
            "mooncake://host:50051."
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Name of the tenant that owns the stored KV; tenants never share KV.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compute and store the KV of documents ahead of time, so that the first request with a document can reuse it.
    Documents that are already stored are skipped. Exit status 1 if some documents could not be stored."""
    given = {
        "chunk_separator": chunk_separator,
        "sink_prefix": sink_prefix,
        "entry_dtype": entry_dtype,
        "disk_path": disk_path,
        "remote": remote,
        "tenant": tenant,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = load_config(model, enable_chunk_cache=True, **settings)
    _check(config, engine, vllm_options)
    # Before the model is loaded: otherwise a bad document in the last file would be found only after hours.
    total = sum(1 for _ in read_corpus(files, config.chunk_separator))
    if total == 0:
        raise PromptError(f"no documents in {', '.join(map(str, files))}")
    if config.remote is not None:
        reach(config.remote)
    from kvmosaic.engines.warm import WarmCounts  # here, because importing it takes seconds

    with console.status(f"loading {model}"):
        warmer = _open(engine, model, dtype, vllm_options or "", settings)
    counts, lost = WarmCounts(), 0
    try:
        with progress_bar(total) as steps:
            for batch in _batches(read_corpus(files, config.chunk_separator)):
                steps.start(batch[0].origin)
                warmer.warm(_chunks(batch, warmer), counts)
                for _ in batch:
                    steps.done()
        with console.status("checking"):
            for batch in _batches(read_corpus(files, config.chunk_separator)):
                lost += warmer.states(_chunks(batch, warmer)).count("missing")
    finally:
        warmer.close()
    print_line(
        f"{total} documents: {counts.filled} filled ({counts.filled_tokens} tokens), {counts.known} there already, "
        f"{counts.too_long} too long, {counts.too_short} too short",
        json,
    )
    if lost:
        print_line(
            f"{lost} documents could not be stored: give the tiers more room (disk_space, tenant_quota, the remote "
            "store's memory), or see the warnings above",
            json,
        )
    if json:
        print_json({"documents": total, **asdict(counts), "lost": lost})
    if lost:
        raise typer.Exit(1)


def _check(config: ChunkCacheConfig, engine: Engine, vllm_options: str | None) -> None:
    """Refuse settings with which the entries would not be found later."""
    if config.disk_path is None and config.remote is None:
        raise ConfigError("no place to store documents; give --disk-path, --remote or both")
    if config.chunk_context == "system":
        raise ConfigError("chunk_context=system: entries depend on the system prompt; documents cannot be warmed")
    if engine is Engine.HF and vllm_options is not None:
        raise ConfigError("--vllm-options need --engine vllm")


def _open(engine: Engine, model: str, dtype: str, vllm_options: str, settings: dict[str, Any]) -> "Warmer":
    settings = {**settings, "enable_chunk_cache": True}
    if engine is Engine.HF:
        from kvmosaic.engines.hf.warm import HFWarmer

        return HFWarmer(model, dtype, **settings)
    # vLLM logs to stdout, which is for results, and so much that it would disturb the progress bar.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no other requests are served meanwhile
    try:
        import_module("kvmosaic.vllm")  # without vLLM, the error says how to install it
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from kvmosaic.engines.vllm.warm import VllmWarmer

    return VllmWarmer(model, dtype, vllm_options, **settings)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    documents = iter(documents)
    while batch := list(islice(documents, AT_ONCE)):
        yield batch


def _chunks(documents: Iterable[Document], warmer: "Warmer") -> list[tuple[int, ...]]:
    """The tokens of documents as chunks of a prompt."""
    return [_chunk(document, warmer) for document in documents]


def _chunk(document: Document, warmer: "Warmer") -> tuple[int, ...]:
    try:
        return warmer.parser.document_tokens(document.text)
    except PromptError as error:
        raise PromptError(f"{document.origin}: {error}") from None
