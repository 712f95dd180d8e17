"""``kvmosaic separator``: a chunk separator that nobody can guess."""

from typing import Annotated

import typer

from kvmosaic.cli.output import JsonOption, console, print_json


def separator(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model from whose tokens the separator is made: a catalog name, a folder, or a Hugging Face name. "
            "Default: random hexadecimal digits."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print a random separator that nobody can guess: a value for chunk_separator, to be used in your prompts."""
    from kvmosaic.core.parser import ChunkTokenParser  # here, because it needs numpy
    from kvmosaic.core.separator import random_separator

    tokenizer = None
    if model is not None:
        from transformers import AutoTokenizer  # importing it takes seconds

        from kvmosaic.models import resolve

        tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    text = random_separator(tokenizer)
    ChunkTokenParser(tokenizer, text)  # raises an error if this tokenizer does not keep the separator intact
    count = None if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))
    if json:
        print_json({"separator": text, "tokens": count})
        return
    typer.echo(text)
    if count is not None:
        console.print(f"{count} tokens; the spaces at both ends are part of the separator")
