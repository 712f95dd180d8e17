"""Weights are identified by their content, wherever they are."""

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


def test_another_file_with_the_size_and_time_of_the_one_before_it(tmp_path, monkeypatch):
    """Tools that restore times, like ``rsync -t`` or ``cp -p``, leave such files, in place or as new files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", a=random.randbytes(1000))
    file = folder / "a.safetensors"
    seen = [weights_digest(str(folder))]
    for replaces in (False, True):
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        fresh = tmp_path / "fresh" if replaces else file
        fresh.write_bytes(random.randbytes(1000))
        os.utime(fresh, ns=times)
        fresh.rename(file)
        seen.append(weights_digest(str(folder)))
    assert seen[0] != seen[1] != seen[2] != seen[0]


def test_a_name_on_the_hub_in_a_folder_that_the_user_chose(tmp_path, monkeypatch):
    """The user chose it with ``--download-dir``."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    seen = []
    for content in (b"one", b"two"):
        chosen = tmp_path / content.decode()
        snapshot = chosen / "models--owner--name" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (chosen / "models--owner--name" / "refs").mkdir()
        (chosen / "models--owner--name" / "refs" / "main").write_text("0123")
        (snapshot / "config.json").write_text("{}")
        write(snapshot, model=content)
        seen.append(weights_digest("owner/name", None, str(chosen)))
    assert None not in seen
    assert seen[0] != seen[1]


def test_a_folder_with_nothing_but_a_configuration_says_nothing_of_weights(tmp_path):
    """vLLM has such a folder if weights are streamed from an object store."""
    for name in ("config.json", "tokenizer.model", "README.md"):
        (tmp_path / name).write_text("{}")
    assert weights_digest(str(tmp_path)) is None


def test_a_note_that_a_crash_left_empty_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = weights_digest(str(tmp_path / "model.safetensors"))
    [note] = (tmp_path / "cache" / "kvmosaic" / "weights").iterdir()
    note.write_text("")
    assert weights_digest(str(tmp_path / "model.safetensors")) == before
