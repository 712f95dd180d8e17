"""Weights are known by their content, wherever they are."""

import os
import random

from kvmosaic.models.digest import weights_digest


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder


def test_copies_are_the_same_and_anything_else_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = random.randbytes(random.randrange(1, 3_000_000))
    first = write(tmp_path / "here", a=content, b=b"more")
    os.utime(first / "a.safetensors", (1, 1))
    copy = write(tmp_path / "there", a=content, b=b"more")
    (copy / "README.md").write_text("not a weight")
    once = weights_digest(first)
    assert once == weights_digest(copy) == weights_digest(first)
    at = random.randrange(len(content))
    changed = write(tmp_path / "here", a=content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert weights_digest(changed) != once
    assert weights_digest(write(tmp_path / "less", a=content)) != once


def test_a_name_on_the_hub_has_none(tmp_path):
    assert weights_digest(tmp_path / "owner" / "name") is None
