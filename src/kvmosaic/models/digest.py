"""What the weights in a folder are, by content: engines on different machines share KV only of the same ones."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import xxhash

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PIECE_BYTES = 2**24
READERS = 8


def weights_digest(folder: Path) -> list[tuple[str, int, str]] | None:
    """Name, size and content hash of each file of weights; ``None`` where there is no such folder, as for a name on
    the hub, whose revision says it. Files were just read by whoever loaded the model, so this is about as fast as
    memory; and each is read once, as its hash is kept until the file changes."""
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    with ThreadPoolExecutor(READERS) as pool:
        digests = pool.map(_digest, files)
        return [(path.name, path.stat().st_size, digest) for path, digest in zip(files, digests, strict=True)]


def _digest(path: Path) -> str:
    status = path.stat()
    known = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    note = (
        Path(platformdirs.user_cache_dir("kvmosaic"))
        / "weights"
        / xxhash.xxh3_128_hexdigest(json.dumps(known).encode())
    )
    try:
        return note.read_text()
    except OSError:
        pass
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest.hexdigest())
        fresh.rename(note)  # other ranks may be reading it
    except OSError:
        pass  # then it is computed again at the next start
    return digest.hexdigest()
