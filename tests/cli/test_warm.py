"""``kvmosaic store warm`` with the embedded engine, and the arguments that it refuses."""

import json
import re

import pytest

from kvmosaic.cli.corpus import read_corpus
from kvmosaic.core.errors import PromptError
from tests.cli.test_cli import kvmosaic, kvmosaic_here


def warm(model, *arguments, check=0, run=kvmosaic_here):
    return run("store", "warm", model, *arguments, "--engine", "hf", check=check)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    monkeypatch.setenv("KVMOSAIC_MIN_CHUNK_TOKENS", "1")
    (folder / "a.txt").write_text("The ferry Cormorant leaves at 6:40 from the pier.\n")
    (folder / ".hidden").write_text("not a document")
    lines = [
        json.dumps({"text": text, "id": 7})
        for text in (
            "Stormcap is a blue goat cheese of Sill Island.",
            "The library is closed on Mondays and Sundays.",
        )
    ]
    (folder / "more" / "b.jsonl").write_text("\n\n".join(lines))
    return folder


@pytest.mark.slow
def test_documents_are_found_by_later_processes_and_not_filled_again(narrow_folder, corpus, tmp_path):
    entries = tmp_path / "kv"
    first = warm(narrow_folder, corpus / "a.txt", "--disk-path", entries, "--json", run=kvmosaic)
    assert (first["documents"], first["filled"]) == (1, 1)
    both = warm(narrow_folder, corpus, corpus / "a.txt", "--disk-path", entries, "--json")
    tokens = both.pop("filled_tokens")
    assert both == {"documents": 4, "filled": 2, "known": 2, "too_long": 0, "too_short": 0, "lost": 0}
    assert tokens > 10
    options = ("--model", narrow_folder, "--document", corpus / "a.txt", "--disk-path", entries, "--max-tokens", 1)
    [chunk] = kvmosaic_here("generate", "When does the ferry leave?", *options, "--json")["chunks"]
    assert (chunk["status"], chunk["tier"]) == ("cached", "disk")


def test_documents_for_which_there_is_no_room_are_reported(narrow_folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("KVMOSAIC_TENANT_QUOTA", "170KiB")  # an entry takes about 70 KiB
    output = warm(narrow_folder, corpus, "--disk-path", tmp_path / "kv", check=1)
    assert "3 documents: 3 filled" in output
    assert "1 documents could not be stored" in output


def test_documents_that_are_too_short_to_be_looked_up_are_counted(narrow_folder, corpus, tmp_path, monkeypatch):
    (corpus / "long.txt").write_text("The ferry Cormorant leaves at 6:40. " * 3)
    (corpus / "one.txt").write_text("Mondays")
    (corpus / "two.txt").write_text("Sundays")
    monkeypatch.setenv("KVMOSAIC_MIN_CHUNK_TOKENS", "25")
    output = warm(narrow_folder, corpus, "--disk-path", tmp_path / "kv", "--json")
    counts = output["filled"], output["too_short"], output["known"], output["lost"]
    assert counts == (1, 5, 0, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": ', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"title": "no text"}', "a.jsonl, line 1: should be an object"),
        ("a.jsonl", b'["text"]', "a.jsonl, line 1: should be an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1: the text has an unpaired surrogate"),
        ("a.jsonl", b'{"text": "one # # two"}', "a.jsonl, line 1: the document has the separator ' # # '"),
        ("a.txt", b" \n", "a.txt: the document is empty"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: 'utf-8' codec can't decode"),
        (None, b"", "No such file"),
    ],
)
def test_bad_documents_are_one_line(tmp_path, name, content, message):
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=re.escape(message)) as caught:
        list(read_corpus([path], " # # "))
    assert "\n" not in str(caught.value)


def test_bad_documents_are_refused_before_anything_is_loaded(corpus, tmp_path):
    (corpus / "z.txt").write_text(" ")
    output = warm("smollm2-135m", corpus, "--disk-path", tmp_path / "kv", check=2)
    assert "z.txt: the document is empty" in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ([], {}, "no place to store documents"),
        (["--disk-path", "kv"], {"KVMOSAIC_CHUNK_CONTEXT": "system"}, "chunk_context=system"),
        (["--disk-path", "kv", "--vllm-options", "--seed 1"], {}, "--vllm-options need --engine vllm"),
        (["--remote", "ftp://host"], {}, "remote="),
        (["--remote", "valkey://127.0.0.1:1"], {}, "cannot be used"),
    ],
)
def test_settings_under_which_nothing_would_be_found_are_refused(corpus, monkeypatch, options, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = warm("smollm2-135m", corpus, *options, check=2)
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_a_folder_without_documents(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "no documents in" in warm("smollm2-135m", tmp_path, "--disk-path", tmp_path / "kv", check=2)
