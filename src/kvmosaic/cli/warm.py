"""``kvmosaic store warm``: fill a corpus ahead of time."""

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
"""Documents handed to the engine together; the step of the progress bar."""


class Engine(str, Enum):
    """Who fills, and later serves."""

    VLLM = "vllm"
    HF = "hf"


def warm(
    model: Annotated[str, typer.Argument(help="Catalog name, folder or hub name.")],
    files: Annotated[
        list[Path],
        typer.Argument(help='Text files, .jsonl files of {"text": …}, folders of both.', metavar="FILE..."),
    ],
    engine: Annotated[
        Engine, typer.Option(help="The engine that will serve: entries of one are not found by the other.")
    ] = Engine.VLLM,
    dtype: Annotated[str, typer.Option(help="As that engine will be started.")] = "auto",
    vllm_options: Annotated[
        str | None, typer.Option(help="More of its options, like '--tensor-parallel-size 2'.")
    ] = None,
    chunk_separator: Annotated[
        str | None, typer.Option(help="What splits prompts into chunks; default: nothing, requests name documents.")
    ] = None,
    sink_prefix: Annotated[
        str | None, typer.Option(help="What chunks are computed after: bos, none, document, learned:FILE, a text.")
    ] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Directory of the disk tier.")] = None,
    remote: Annotated[
        str | None, typer.Option(help="The remote tier: valkey://host:6379/0 or mooncake://host:50051.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose entries these are.")] = None,
    json: JsonOption = False,
) -> None:
    """Fill documents ahead of time, so that the first request that has them finds them. What is there is skipped.
    Exit status 1 if there was no room for all."""
    given = {
        "chunk_separator": chunk_separator,
        "sink_prefix": sink_prefix,
        "disk_path": disk_path,
        "remote": remote,
        "tenant": tenant,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = load_config(model, enable_chunk_cache=True, **settings)
    _check(config, engine, vllm_options)
    # Before a model is loaded: a bad document in the last file should not be found after hours.
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
            f"{lost} of them could not be kept: give the tiers more room (disk_space, tenant_quota, the remote "
            "store's memory), or see the warnings above",
            json,
        )
    if json:
        print_json({"documents": total, **asdict(counts), "lost": lost})
    if lost:
        raise typer.Exit(1)


def _check(config: ChunkCacheConfig, engine: Engine, vllm_options: str | None) -> None:
    """Refuse settings under which nothing would be found later."""
    if config.disk_path is None and config.remote is None:
        raise ConfigError("nowhere to keep documents; give --disk-path, --remote or both")
    if config.chunk_context == "system":
        raise ConfigError("chunk_context=system: entries depend on the system prompt, documents cannot be warmed")
    if engine is Engine.HF and vllm_options is not None:
        raise ConfigError("--vllm-options need --engine vllm")


def _open(engine: Engine, model: str, dtype: str, vllm_options: str, settings: dict[str, Any]) -> "Warmer":
    settings = {**settings, "enable_chunk_cache": True}
    if engine is Engine.HF:
        from kvmosaic.engines.hf.warm import HFWarmer

        return HFWarmer(model, dtype, **settings)
    # vLLM logs to stdout, which is for results, and a lot, which is not for a progress bar.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # nobody else is to be served meanwhile
    try:
        import_module("kvmosaic.vllm")  # where vLLM is missing, it says how to install it
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from kvmosaic.engines.vllm.warm import VllmWarmer

    return VllmWarmer(model, dtype, vllm_options, **settings)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    documents = iter(documents)
    while batch := list(islice(documents, AT_ONCE)):
        yield batch


def _chunks(documents: Iterable[Document], warmer: "Warmer") -> list[tuple[int, ...]]:
    """Their tokens as chunks of a prompt."""
    return [_chunk(document, warmer) for document in documents]


def _chunk(document: Document, warmer: "Warmer") -> tuple[int, ...]:
    try:
        return warmer.parser.document_tokens(document.text)
    except PromptError as error:
        raise PromptError(f"{document.origin}: {error}") from None
