"""``kvmosaic separator``: a chunk separator that nobody can guess."""

from typing import Annotated

import typer

from kvmosaic.cli.output import JsonOption, console, print_json


def separator(
    model: Annotated[
        str | None, typer.Argument(help="Catalog name, folder or hub name; its tokens are the separator's words.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print a random separator, for the setting chunk_separator and for whoever writes prompts."""
    from kvmosaic.core.parser import ChunkTokenParser  # here, because it needs numpy
    from kvmosaic.core.separator import random_separator

    tokenizer = None
    if model is not None:
        from transformers import AutoTokenizer  # which takes seconds

        from kvmosaic.models import resolve

        tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    text = random_separator(tokenizer)
    ChunkTokenParser(tokenizer, text)  # says if it does not survive this tokenizer
    count = None if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))
    if json:
        print_json({"separator": text, "tokens": count})
        return
    typer.echo(text)
    if count is not None:
        console.print(f"{count} tokens; its first and last characters are spaces, which belong to it")
