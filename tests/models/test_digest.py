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
    once = weights_digest(str(first))
    assert once == weights_digest(str(copy)) == weights_digest(str(first))
    at = random.randrange(len(content))
    changed = write(tmp_path / "here", a=content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert weights_digest(str(changed)) != once
    assert weights_digest(str(write(tmp_path / "less", a=content))) != once


def test_weights_of_an_unknown_kind_count_as_well(tmp_path):
    digests = []
    for content in (b"one", b"two"):
        (tmp_path / "weights.new").write_bytes(content)
        digests.append([weights_digest(str(tmp_path)), weights_digest(str(tmp_path / "weights.new"))])
    assert digests[0][0] == digests[0][1] != digests[1][0] == digests[1][1]


def test_a_name_on_the_hub_is_looked_up_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_digest("owner/name") is None
    assert weights_digest("not/a/name") is None
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    write(snapshot, model=b"weights")
    assert weights_digest("owner/name") == weights_digest(str(snapshot)) is not None
