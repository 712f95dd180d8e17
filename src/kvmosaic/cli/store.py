"""``kvmosaic store``: look after the entries on disk."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table, progress_bar
from kvmosaic.core.errors import ConfigError

if TYPE_CHECKING:  # importing it for real takes seconds, which `kvmosaic --help` should not
    from kvmosaic.store import DiskTier, EntryInfo

app = typer.Typer(help="Look after the entries on disk.", no_args_is_help=True)

PathOption = Annotated[
    Path, typer.Option("--path", envvar="KVMOSAIC_DISK_PATH", help="Directory of the disk tier.", show_envvar=True)
]
MODEL_HELP = "Only entries of this model."
TENANT_HELP = "Only entries of this tenant."
ModelFilter = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
TenantFilter = Annotated[str | None, typer.Option("--tenant", help=TENANT_HELP)]


def _open(path: Path) -> "DiskTier":
    from kvmosaic.store import DiskTier

    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give the disk tier's with --path")
    return DiskTier(path, capacity=0)


def _select(tier: "DiskTier", model: str | None, tenant: str | None) -> Iterator["EntryInfo"]:
    for info in tier.scan():
        if model in (None, info.key.model) and tenant in (None, info.key.tenant):
            yield info


@app.command("ls")
def ls(path: PathOption, model: ModelFilter = None, tenant: TenantFilter = None, json: JsonOption = False) -> None:
    """List what is stored."""
    with console.status("reading headers"):
        entries = list(_select(_open(path), model, tenant))
    total = sum(entry.nbytes for entry in entries)
    print_table(
        f"{len(entries)} entries, {total / 2**20:.1f} MB",
        ("hash", "tenant", "model", "format", "tokens", "MB"),
        (
            (
                key.content_hash.hex(),
                key.tenant,
                key.model,
                key.fingerprint,
                key.num_tokens,
                f"{entry.nbytes / 2**20:.2f}",
            )
            for entry in entries
            for key in (entry.key,)
        ),
        json=json,
    )
    if json:
        rows = [{"key": str(entry.key), "tokens": entry.key.num_tokens, "bytes": entry.nbytes} for entry in entries]
        print_json({"entries": rows, "bytes": total})


@app.command("verify")
def verify(path: PathOption, json: JsonOption = False) -> None:
    """Read every entry and check it; damaged ones are set aside. Exit status 1 if there were any."""
    from kvmosaic.store import CorruptEntryError

    tier = _open(path)
    entries = list(tier.scan())
    with progress_bar(len(entries)) as steps:
        for info in entries:
            steps.start(info.key.content_hash.hex())
            with suppress(CorruptEntryError):  # counted and set aside by the tier
                tier.get(info.key)
            steps.done()
    print_line(f"{len(entries)} entries checked, {tier.set_aside} damaged and set aside", json)
    if json:
        print_json({"checked": len(entries), "set_aside": tier.set_aside})
    if tier.set_aside:
        raise typer.Exit(1)


@app.command("purge")
def purge(
    path: PathOption,
    model: ModelFilter = None,
    tenant: TenantFilter = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything, also what was set aside.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete entries: of a model, of a tenant, or all."""
    if model is None and tenant is None and not everything:
        raise ConfigError("nothing chosen to purge; give --model, --tenant or --all")
    tier = _open(path)
    entries = list(_select(tier, model, tenant))
    with progress_bar(len(entries)) as steps:
        for info in entries:
            tier.delete(info.key)
            steps.done()
    freed = sum(entry.nbytes for entry in entries)
    if everything:
        tier.remove_set_aside()
    print_line(f"{len(entries)} entries deleted, {freed / 2**20:.1f} MB freed", json)
    if json:
        print_json({"deleted": len(entries), "bytes": freed})
