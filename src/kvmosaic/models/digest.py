"""Identifies weights by their content. Engines on different machines share KV only if their weights are the same."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import platformdirs
import xxhash

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NO_WEIGHTS = ("", ".json", ".jinja", ".md", ".model", ".py", ".txt")
"""Suffixes of other files in a model's folder."""
PIECE_BYTES = 2**24
READERS = 8


def weights_digest(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> list[tuple[str, int, str]] | None:
    """Name, size and content hash of each weights file of a model: a folder, a file, or a name on the hub. ``None``
    if there are none; names are looked up in the hub's cache, in ``cache_dir`` or its usual place. The files were
    just read to load the model, so this is about as fast as memory. The hash of a file is cached until the file
    changes."""
    place = Path(model) if Path(model).exists() else _hub_folder(model, revision, cache_dir)
    if place is None:
        return None
    every = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else [place]
    # For weights with unknown suffixes, all unknown files are hashed: better too many differences than too few.
    files = [path for path in every if path.suffix in WEIGHTS]
    files = files or [path for path in every if path.suffix not in NO_WEIGHTS]
    if not files:
        return None  # the weights are elsewhere
    with ThreadPoolExecutor(READERS) as pool:
        digests = pool.map(_digest, files)
        return [(path.name, path.stat().st_size, digest) for path, digest in zip(files, digests, strict=True)]


def _hub_folder(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Folder of a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:  # not a name on the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def _digest(path: Path) -> str:
    status = path.stat()
    # A file that replaces another may have the same size and modification time, but not the same change time (ctime).
    known = [str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    note = (
        Path(platformdirs.user_cache_dir("kvmosaic"))
        / "weights"
        / xxhash.xxh3_128_hexdigest(json.dumps(known).encode())
    )
    with suppress(OSError):
        kept = note.read_text()
        if len(kept) == 2 * xxhash.xxh3_128().digest_size:  # else the machine crashed while the note was written
            return kept
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    with suppress(OSError):  # without a note, the hash is computed again at the next start
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest.hexdigest())
        fresh.rename(note)  # other ranks may be reading it
    return digest.hexdigest()
