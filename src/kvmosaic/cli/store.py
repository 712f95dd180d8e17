"""``kvmosaic store``: list, check, delete and fill entries on disk or in a remote store."""

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table, progress_bar
from kvmosaic.cli.remote import open_remote
from kvmosaic.cli.warm import warm
from kvmosaic.core.errors import ConfigError

if TYPE_CHECKING:  # importing it for real takes seconds, which `kvmosaic --help` should not
    from kvmosaic.store import EntryInfo, Tier

app = typer.Typer(
    help="List, check, delete and fill stored KV entries on disk or in a remote store.", no_args_is_help=True
)

PATH_VARIABLE = "KVMOSAIC_DISK_PATH"
PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path", envvar=PATH_VARIABLE, help="Directory in which the KV entries are stored on disk.", show_envvar=True
    ),
]
# Not read from the environment: purge deletes entries there, and many machines may share them.
RemoteOption = Annotated[
    str | None,
    typer.Option("--remote", help="URL of a remote store to use instead of --path, like valkey://host:6379/0."),
]
MODEL_HELP = "Select only the entries of this model."
TENANT_HELP = "Select only the entries of this tenant."
ModelFilter = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
TenantFilter = Annotated[str | None, typer.Option("--tenant", help=TENANT_HELP)]


def _open(path: Path | None, remote: str | None) -> "Tier":
    from kvmosaic.store import DiskTier
    from kvmosaic.store.seal import EntryCheck, Seal

    if remote is not None:
        if path is not None and str(path) != os.environ.get(PATH_VARIABLE):
            raise ConfigError("which store? give --path or --remote, not both")
        return open_remote(remote)
    if path is None:
        raise ConfigError("which store? give the disk tier's directory with --path, or a remote store with --remote")
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give the disk tier's with --path")
    return DiskTier(path, capacity=0, check=EntryCheck(Seal.from_environment()))


def _select(tier: "Tier", model: str | None, tenant: str | None, json: bool) -> list["EntryInfo"]:
    """The entries of a model and a tenant; ``None`` selects all. If a name has no entries, the names that have some
    are printed, because names are long."""
    entries = list(tier.scan())
    for option, wanted, names in (
        ("--model", model, {entry.key.model for entry in entries}),
        ("--tenant", tenant, {entry.key.tenant for entry in entries}),
    ):
        if wanted is not None and names and wanted not in names:
            print_line(
                f"nothing is stored for {option} {wanted}; there are entries for: {', '.join(sorted(names))}", json
            )
    return [entry for entry in entries if model in (None, entry.key.model) and tenant in (None, entry.key.tenant)]


@app.command("ls")
def ls(
    path: PathOption = None,
    remote: RemoteOption = None,
    model: ModelFilter = None,
    tenant: TenantFilter = None,
    json: JsonOption = False,
) -> None:
    """List the stored entries."""
    with console.status("looking"):
        entries = _select(_open(path, remote), model, tenant, json)
    total, now = sum(entry.nbytes for entry in entries), time.time()
    print_table(
        f"{len(entries)} entries, {total / 2**20:.1f} MiB",
        ("hash", "kind", "tenant", "model", "format", "heads", "tokens", "MiB", "age", "reads"),
        (
            (
                key.content_hash.hex(),
                entry.kind or "–",
                key.tenant,
                key.model,
                key.fingerprint,
                key.heads,
                key.num_tokens,
                f"{entry.nbytes / 2**20:.2f}",
                _age(entry, now),
                "–" if entry.hits is None else entry.hits,
            )
            for entry in entries
            for key in (entry.key,)
        ),
        json=json,
    )
    if json:
        rows = [
            {
                "key": str(entry.key),
                "tokens": entry.key.num_tokens,
                "bytes": entry.nbytes,
                "kind": entry.kind,
                "stored_at": entry.since,
                "reads": entry.hits,
            }
            for entry in entries
        ]
        print_json({"entries": rows, "bytes": total})


def _age(entry: "EntryInfo", now: float) -> str:
    """How long ago an entry was stored, in its largest unit."""
    if entry.since is None:
        return "–"
    seconds = max(0.0, now - entry.since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command("stats")
def stats(path: PathOption = None, remote: RemoteOption = None, json: JsonOption = False) -> None:
    """Count entries and their bytes, by tenant and model."""
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    with console.status("looking"):
        for entry in _open(path, remote).scan():
            counts[entry.key.tenant, entry.key.model] += 1
            nbytes[entry.key.tenant, entry.key.model] += entry.nbytes
    rows = [(*owner, counts[owner], nbytes[owner]) for owner in sorted(counts)]
    print_table(
        f"{counts.total()} entries, {nbytes.total() / 2**20:.1f} MiB",
        ("tenant", "model", "entries", "MiB"),
        ((tenant, model, count, f"{size / 2**20:.2f}") for tenant, model, count, size in rows),
        json=json,
    )
    if json:
        names = ("tenant", "model", "entries", "bytes")
        owners = [dict(zip(names, row, strict=True)) for row in rows]
        print_json({"entries": counts.total(), "bytes": nbytes.total(), "owners": owners})


@app.command("verify")
def verify(path: PathOption = None, remote: RemoteOption = None, json: JsonOption = False) -> None:
    """Read and check every entry. Damaged entries are set aside on disk, and deleted from a remote store. Exit status
    1 if an entry is damaged. Entries that were stored with another store key, or without the key that is set, cannot
    be checked and are kept."""
    from kvmosaic.core.store_key import STORE_KEY_VARIABLE, StoreKey
    from kvmosaic.store import CorruptEntryError

    tier, key = _open(path, remote), StoreKey.from_environment()
    every = list(tier.scan())
    entries = [info for info in every if info.key.sealed_by == (None if key is None else key.id)]
    others = len(every) - len(entries)
    with progress_bar(len(entries)) as steps:
        for info in entries:
            steps.start(info.key.content_hash.hex())
            with suppress(CorruptEntryError):  # counted and set aside by the tier
                tier.get(info.key)
            steps.done()
    fate = "set aside" if remote is None else "deleted"
    print_line(f"{len(entries)} entries checked, {tier.set_aside} damaged and {fate}", json)
    if others:
        print_line(
            f"{others} entries have another store key and were not checked; set {STORE_KEY_VARIABLE} to that key",
            json,
        )
    if json:
        print_json({"checked": len(entries), "set_aside": tier.set_aside, "other_key": others})
    if tier.set_aside:
        raise typer.Exit(1)


@app.command("purge")
def purge(
    path: PathOption = None,
    remote: RemoteOption = None,
    model: ModelFilter = None,
    tenant: TenantFilter = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all entries, and damaged entries that were set aside.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete the entries of a model, of a tenant, or all entries."""
    from kvmosaic.store import DiskTier

    if everything and (model is not None or tenant is not None):
        raise ConfigError("--all deletes everything; give either it or --model and --tenant")
    if model is None and tenant is None and not everything:
        raise ConfigError("nothing chosen to purge; give --model, --tenant or --all")
    tier = _open(path, remote)
    with console.status("deleting"):
        entries = _select(tier, model, tenant, json)
        tier.delete_all(entry.key for entry in entries)
    freed = sum(entry.nbytes for entry in entries)
    if everything and isinstance(tier, DiskTier):
        tier.remove_set_aside()
    print_line(f"{len(entries)} entries deleted, {freed / 2**20:.1f} MiB freed", json)
    if json:
        print_json({"deleted": len(entries), "bytes": freed})


app.command("warm")(warm)
