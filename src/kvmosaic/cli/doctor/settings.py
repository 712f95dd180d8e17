"""Checks of the settings, and of the memory, disk and remote store that they need."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from kvmosaic.blend import policy_named
from kvmosaic.cli.doctor.row import GIB, Row, reason
from kvmosaic.cli.serve import check_settings
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import find_profile, load_profile
from kvmosaic.core.sink import LEARNED
from kvmosaic.models.sink_file import load_sink

SAMPLE = 1000
"""Maximum number of files and folders of the disk tier whose permissions are checked."""


def load_settings(given: dict[str, Any]) -> tuple[ChunkCacheConfig, Row]:
    """The settings, without those of a profile. ``given``: those of the command line."""
    try:
        settings = load_config(**given)
        check_settings(settings)
    except Exception as error:  # including a YAML file that cannot be read
        return ChunkCacheConfig.model_construct(), Row(
            "settings", "fail", "invalid; assuming defaults", reason(error)
        )
    changed = [f"{name}={value}" for name, value in settings.model_dump(mode="json", exclude_defaults=True).items()]
    return settings, Row("settings", "ok", ", ".join(changed) or "all at their defaults")


def model_settings(model: str, given: dict[str, Any], settings: ChunkCacheConfig) -> ChunkCacheConfig:
    """The settings that a server of a model has, with the chunk cache on. If its profile cannot be used, which
    another check reports, those without it."""
    try:
        return load_config(model, **given | {"enable_chunk_cache": True})
    except ConfigError:
        return settings.model_copy(update={"enable_chunk_cache": True})


def profile(model: str, settings: ChunkCacheConfig) -> Iterator[Row]:
    """The model's profile, and which of its settings are used because nothing else sets them."""
    path = find_profile(model)
    found = load_profile(path)
    if not found:
        yield Row(
            "profile", "ok", f"none, your settings and the defaults are used; kvmosaic calibrate {model} makes one"
        )
        return
    counts = {name: value for name, value in found.items() if name not in settings.model_fields_set}
    sets = ", ".join(f"{name}={value}" for name, value in counts.items()) or "nothing"
    ignored = [name for name in found if name not in counts]
    beside = f" ({', '.join(ignored)}: from your settings)" if ignored else ""
    try:
        policy_named(counts.get("policy", settings.policy))
    except ConfigError as error:
        yield Row("profile", "fail", f"sets {sets}{beside}", f"profile {path}: {error}")
        return
    yield Row("profile", "ok", f"{path} sets {sets}{beside}")


def learned_sink(model: str, settings: ChunkCacheConfig) -> Iterator[Row]:
    """The sink that was learned for the model, if its settings name one. Only an engine can tell whether the sink is
    really this model's."""
    found = {} if "sink_prefix" in settings.model_fields_set else load_profile(find_profile(model))
    setting = found.get("sink_prefix", settings.sink_prefix)
    if not setting.startswith(LEARNED):
        return
    path = setting.removeprefix(LEARNED)
    try:
        sink = load_sink(path)
    except ConfigError as error:
        yield Row("learned sink", "fail", path, f"{error}; or choose another sink_prefix")
        return
    about = sink.about
    kl = f"held-out KL {about.kl_after:.3f}, {about.kl_before:.3f} with the default text"
    yield Row("learned sink", "ok", f"{path}: {len(sink.tokens)} tokens, learned for {about.model}; {kl}")


def host_memory(settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    wanted, available = settings.host_memory * processes, _available_memory()
    if available is None:
        yield Row("host memory", "ok", f"{wanted / GIB:.1f} GiB; free memory is not known on this system")
        return
    found = f"{wanted / GIB:.1f} of {available / GIB:.1f} GiB available"
    if wanted <= available:
        yield Row("host memory", "ok", found)
    else:
        most = int(available / processes / 2 / 2**20)
        yield Row(
            "host memory", "warn", found, f"not enough memory is available; set host_memory to {most}MiB or less"
        )


def _available_memory() -> int | None:
    """Available memory in bytes, at most a container's limit; ``None`` if Linux's files are missing."""
    known = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" means that there is no limit
            known.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(known, default=None)


def disk_tier(settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    if settings.disk_path is None:
        yield Row("disk tier", "ok", "none; disk_path is not set")
        return
    path = settings.disk_path.expanduser().absolute()
    # Nothing is created. For a directory that does not exist yet, its nearest existing parent is checked.
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Row("disk tier", "fail", str(path), f"cannot write there ({error.strerror}); choose another disk_path")
        return
    held = 0
    name, sharing, ours = "disk_space", processes, path
    if settings.tenant_quota is not None:  # one budget for all processes, and only for this tenant's files
        from kvmosaic.store.tiers.disk import folder_name

        name, sharing, ours = "tenant_quota", 1, path / folder_name(settings.tenant)
    budget = settings.disk_budget * sharing
    for file in ours.rglob("*.safetensors"):
        with suppress(FileNotFoundError):  # another process may be evicting
            held += file.stat().st_size
    free = shutil.disk_usage(existing).free
    found = f"{held / GIB:.1f} of {budget / GIB:.1f} GiB used, {free / GIB:.1f} GiB free"
    if held + free >= budget:
        yield Row("disk tier", "ok", found)
    else:
        most = int((held + free) / sharing / 2**20)
        yield Row(
            "disk tier", "warn", found, f"the disk has less room than the budget; set {name} to {most}MiB or less"
        )
    yield from _privacy(path)


def _privacy(path: Path) -> Iterator[Row]:
    """Whether other users can read the KV of documents, or write KV that engines will read."""
    open_to_others, looked_at = [], 0
    for place in (path, *islice(_inside(path), SAMPLE)):
        with suppress(OSError):  # another process may be evicting
            status = os.lstat(place)
            looked_at += 1
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077:
                open_to_others.append(place)
    if not looked_at:
        return
    if not open_to_others:
        yield Row("disk tier's files", "ok", f"accessible to this user only ({looked_at} checked)")
        return
    found = f"{len(open_to_others)} of {looked_at} checked are open to other users, such as {open_to_others[0]}"
    yield Row("disk tier's files", "warn", found, f"other users can read or plant KV there; chmod -R go= {path}")


def _inside(path: Path) -> Iterator[Path]:
    """All files and folders below a folder. Links are not followed."""
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))


def remote_tier(settings: ChunkCacheConfig) -> Iterator[Row]:
    if settings.remote is None:
        yield Row("remote tier", "ok", "none; remote is not set")
        return
    from kvmosaic.store.tiers.remote import open_remote_tier

    # A store that does not answer is only a warning, because engines start without it. A missing library prevents a
    # start: opening the tier raises an error, and the check fails.
    tier = open_remote_tier(settings.remote, settings.remote_deadline_ms / 1000)
    begin = time.perf_counter()
    try:
        tier.check()
        yield Row("remote tier", "ok", f"{settings.remote} answers in {(time.perf_counter() - begin) * 1e3:.1f} ms")
    except OSError as error:
        yield Row("remote tier", "warn", settings.remote, f"{reason(error)}; engines start without it")
    finally:
        tier.close()
