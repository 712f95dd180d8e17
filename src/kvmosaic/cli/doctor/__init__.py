"""``kvmosaic doctor``: whether this machine, these settings and a model work together, before anything is started."""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvmosaic.cli.doctor.row import Row, guard
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table
from kvmosaic.cli.setting_options import takes_settings
from kvmosaic.core.errors import ConfigError


@takes_settings
def doctor(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model to check: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name. It is never downloaded."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel size with which vLLM will be started.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, help="Pipeline-parallel size with which vLLM will be started.")
    ] = 1,
    json: JsonOption = False,
    **settings: Any,
) -> None:
    """Check this machine, the settings and a model, with the options that `kvmosaic serve MODEL` will get: put
    `doctor` in the place of `serve`. Nothing is started. Exit status 1 if something will not work."""
    given = {name: value for name, value in settings.items() if value is not None}
    if model is None or model.startswith("-"):
        unknown = [*([] if model is None else [model]), *context.args]
        if unknown:
            raise ConfigError(f"{unknown[0]}: options of vLLM are checked together with a model; name it before them")
    with _quiet_and_offline(), console.status("checking"):
        rows = list(_checks(model, given, context.args, tensor_parallel_size, pipeline_parallel_size))
    count = Counter(row.verdict for row in rows)
    title = f"{len(rows)} checks: {count['ok']} ok, {count['warn']} warn, {count['fail']} fail"
    shown = ((row.check, row.verdict, escape(row.found)) for row in rows)
    print_table(title, ("check", "verdict", "found"), shown, json=json)
    for row in rows:
        if row.advice:  # below the table, whose cells do not wrap
            print_line(f"{row.verdict}: {row.check}: {row.advice}", json)
    if json:
        print_json({"ok": not count["fail"], "checks": [row._asdict() for row in rows]})
    if count["fail"]:
        raise typer.Exit(1)


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Silence libraries, some of which print to stdout while they are imported, and keep them from asking a model hub
    for missing files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable()
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _checks(
    model: str | None, given: dict[str, Any], options: Sequence[str], ranks: int, stages: int
) -> Iterator[Row]:
    # Imported here because they import torch, which would slow other commands down.
    from kvmosaic.cli.doctor.in_vllm import Served, served
    from kvmosaic.cli.doctor.machine import accelerator, embedded_engine, kvmosaic_itself, runtime, vllm
    from kvmosaic.cli.doctor.model import find, model_rows
    from kvmosaic.cli.doctor.settings import (
        disk_tier,
        host_memory,
        learned_sink,
        load_settings,
        model_settings,
        profile,
        remote_tier,
    )

    settings, row = load_settings(given)
    plan = Served(ranks, stages)
    source = None if model is None else find(model)
    if model is not None and isinstance(source, str):
        plan = served(source, model_settings(model, given, settings), options, plan)
    yield from guard("kvmosaic", kvmosaic_itself())
    yield from guard("Python, torch", runtime())
    yield from guard("accelerator", accelerator(settings))
    yield from guard("embedded engine", embedded_engine())
    yield from guard("vLLM", vllm())
    yield row
    yield from guard("host memory", host_memory(settings, plan.processes))
    yield from guard("disk tier", disk_tier(settings, plan.processes))
    yield from guard("remote tier", remote_tier(settings))
    if model is None:
        return
    yield from guard("profile", profile(model, settings))
    yield from guard("learned sink", learned_sink(model, settings))
    if isinstance(source, Row):
        yield source
    elif source is not None:
        yield from guard("model", model_rows(source, settings, plan))
