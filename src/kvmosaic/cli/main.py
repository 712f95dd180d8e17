"""Entry point: collects the commands, turns errors into one line."""

import logging
import sys
from typing import Annotated, NoReturn

import typer

from kvmosaic import __version__
from kvmosaic.cli import (
    bench,
    calibrate,
    dashboard,
    demo,
    doctor,
    eval,
    generate,
    models,
    separator,
    serve,
    store,
    tune,
)
from kvmosaic.cli.output import console
from kvmosaic.core.errors import KvmosaicError

app = typer.Typer(
    help="Reuse the KV cache of documents at any position, in any prompt.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(demo.demo)
app.command(context_settings={"allow_extra_args": True})(generate.generate)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.command()(separator.separator)
app.command("eval")(eval.evaluate)
app.command()(calibrate.calibrate)
app.command()(tune.tune)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor.doctor)
app.command()(dashboard.dashboard)
app.add_typer(models.app, name="models")
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"kvmosaic {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Expected errors, including errors in the command line itself, end in one line and exit
    status 2."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        status = app(standalone_mode=False)
    except (KvmosaicError, OSError) as error:
        _fail(str(error))
    except typer.TyperException as error:
        reason = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
        if reason:  # empty when a command without arguments has just shown its help
            _fail(f"{reason}; see --help")
        status = 2
    sys.exit(status)


def _fail(reason: str) -> NoReturn:
    console.print(f"error: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
