"""The command line, run in a separate process as users run it, or in this process where that shows the same."""

import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.hf import LLM
from tests.cli.command import run_here
from tests.engines.hf.tiny import make


def kvmosaic(*arguments, check=0, **kwargs):
    """Run the command; returns its JSON result when it printed one, else its output."""
    done = subprocess.run(
        [sys.executable, "-m", "kvmosaic.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )
    return result_of(done, arguments, check)


def kvmosaic_here(*arguments, check=0, stdin=""):
    """Run the command in this process, which is seconds faster."""
    return result_of(run_here(*arguments, stdin=stdin), arguments, check)


def result_of(done, arguments, check):
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return (
        json.loads(done.stdout.splitlines()[-1])
        if "--json" in arguments and check == 0
        else done.stdout + done.stderr
    )


NARROW = object()
"""Placeholder for the folder of a model that loads quickly. Only a fixture knows the folder."""


@pytest.fixture
def stored(tmp_path):
    """A directory with the entries of two tenants."""
    from kvmosaic.core.prompt import ChunkedPrompt, Span

    prompt = ChunkedPrompt(tuple(range(3, 63)), (Span(5, 25), Span(25, 50)))
    for tenant in ("a", "b"):
        with LLM(make("llama"), enable_chunk_cache=True, disk_path=tmp_path, tenant=tenant) as llm:
            llm.generate([prompt], max_tokens=1)
    return tmp_path


def test_version():
    assert kvmosaic("--version").startswith("kvmosaic 0.")


@pytest.mark.parametrize(
    "arguments",
    [("nothing",), ("eval",), ("eval", "m", "--wrong"), ("eval", "m", "--data", "synthetic", "--limit", "many")],
)
def test_a_wrong_command_line_is_one_line(arguments):
    assert len(kvmosaic(*arguments, check=2).splitlines()) == 1


def test_help_does_not_wait_for_large_libraries():
    code = "import sys, kvmosaic.cli.main; print({'torch', 'transformers', 'vllm', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_no_arguments_show_the_help():
    assert "Commands" in kvmosaic("store", check=2)


@pytest.fixture
def quick_model(tmp_path, smollm2_folder):
    """SmolLM2 with a few layers and its own tokenizer: the demo's 20 prefills of a thousand tokens in seconds."""
    folder = tmp_path / "quick-model"
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, num_hidden_layers=2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_folder).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_demo(stored, quick_model, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("KVMOSAIC_DISK_PATH", str(stored))
    before = sorted(stored.rglob("*"))
    page = tmp_path_factory.mktemp("demo") / "page.html"
    result = kvmosaic("demo", "--model", quick_model, "--max-tokens", 3, "--html", page, "--json")
    assert sorted(stored.rglob("*")) == before  # the user's store is left alone
    requests = result["requests"]
    assert [request["mode"] for request in requests] == ["plain", *["reuse"] * 6]
    for request in requests:
        assert {"ttft_ms", "full_prefill_ttft_ms", "prompt_tokens", "cached_tokens", "recomputed_tokens"} <= set(
            request
        )
        assert request["text"]
    assert requests[1]["cached_tokens"] > 900
    assert requests[-1]["recomputed_tokens"] == requests[-1]["cached_tokens"]
    assert requests[-1]["text"] == requests[-1]["full_prefill_text"]
    assert result["peak_mb"] < 4096
    inside = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    assert [drawn["title"] for drawn in inside["requests"]] == [request["title"] for request in requests]
    for drawn, request in zip(inside["requests"], requests, strict=True):
        marked = sum(end - start for start, end in drawn["report"]["recomputed"])
        assert marked == request["recomputed_tokens"]
    assert sum(inside["stats"]["counts"]["chunk_hits"].values()) == 29


@pytest.mark.slow
def test_generate_keeps_documents_between_calls(tmp_path, narrow_folder):
    document = tmp_path / "ferry.txt"
    document.write_text("The ferry Cormorant leaves at 6:40 in the morning, from the north pier in Port Almery.")
    options = (
        "--model",
        narrow_folder,
        "--document",
        document,
        "--max-tokens",
        4,
        "--temperature",
        0,
        "--disk-path",
        tmp_path / "kv",
        "--json",
    )
    first = kvmosaic("generate", "When does it leave?", *options)
    second = kvmosaic_here("generate", "When does it leave?", "--system", "Be brief.", *options)
    assert [chunk["status"] for chunk in first["chunks"]] == ["prefilled"]
    assert [(chunk["status"], chunk["tier"]) for chunk in second["chunks"]] == [("cached", "disk")]


def test_generate_reads_stdin(narrow_folder, monkeypatch):
    monkeypatch.setenv("KVMOSAIC_CHUNK_SEPARATOR", " # # ")
    options = ("--model", narrow_folder, "--max-tokens", 2, "--json")
    document = "some document of a few more words than the shortest one that is worth to be stored has"
    output = kvmosaic_here("generate", "-", *options, stdin=f"s # # {document} # # question")
    assert len(output["chunks"]) == 1


def test_store_ls_and_purge(stored):
    entries = kvmosaic_here("store", "ls", "--path", stored, "--json")["entries"]
    assert len(entries) == 4
    assert {entry["kind"] for entry in entries} == {"document"}
    assert all(time.time() - 600 < entry["stored_at"] <= time.time() for entry in entries)
    assert len(re.findall(r"document.* \d+ (s|min)\b", run_here("store", "ls", "--path", stored).stdout)) == 4
    assert len(kvmosaic_here("store", "ls", "--path", stored, "--tenant", "a", "--json")["entries"]) == 2
    assert kvmosaic_here("store", "purge", "--path", stored, "--tenant", "a", "--json")["deleted"] == 2
    assert len(kvmosaic_here("store", "ls", "--path", stored, "--json")["entries"]) == 2
    assert kvmosaic_here("store", "purge", "--path", stored, "--all", "--json")["deleted"] == 2


def test_store_verify_sets_damaged_files_aside(stored):
    assert kvmosaic_here("store", "verify", "--path", stored, "--json") == {
        "checked": 4,
        "set_aside": 0,
        "other_key": 0,
    }
    file = next(stored.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "1 damaged" in kvmosaic_here("store", "verify", "--path", stored, check=1)
    assert kvmosaic_here("store", "verify", "--path", stored, "--json") == {
        "checked": 3,
        "set_aside": 0,
        "other_key": 0,
    }


@pytest.mark.slow
def test_bench_lookup_is_flat():
    """A thousand times as many entries must not make a lookup slower. The bound is loose because machines are
    noisy."""
    assert kvmosaic_here("bench", "lookup", "--json")["ratio_1e5_over_1e2"] < 10


def test_bench_eviction_beats_lru():
    for row in kvmosaic_here("bench", "eviction", "--json")["rows"]:
        assert row["s3fifo_hit_rate"] > row["lru_hit_rate"]


def test_bench_documents(smollm2_folder):
    rows = kvmosaic_here("bench", "documents", "--tokens", 2000, "--repeats", 2, "--json")["rows"]
    assert [row["documents"] for row in rows] == [5, 20, 60]
    assert all(row["ms_per_10k"] > 0 for row in rows)


def test_bench_discovery_finds_most_of_what_comes_back():
    rows = kvmosaic_here("bench", "discovery", "--prompts", 60, "--json")["rows"]
    assert [row["traffic"] for row in rows] == ["RAG, other order", "RAG, numbered", "chat", "agent"]
    for row in rows:
        assert row["found"] > 0.7 * row["seen_twice"]


def test_bench_discovery_with_documents_from_a_file(tmp_path, smollm2_folder):
    lines = [{"chunks": [f"{n} {'word ' * 90} {n}" for n in range(6)], "question": "what", "answers": ["it"]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ("--data", tmp_path / "data.jsonl", "--model", smollm2_folder)
    rows = kvmosaic_here("bench", "discovery", "--prompts", 5, *data, "--json")["rows"]
    assert all(row["prompts"] == 5 for row in rows)


@pytest.mark.long
def test_bench_chunk_hit(smollm2_folder):
    result = kvmosaic_here("bench", "chunk-hit", "--tokens", 64, "--json")
    assert result["host_ms"] < result["compute_ms"]
    assert result["disk_ms"] < result["compute_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "pull", "gpt-9"), "gpt-9"),
        (("store", "ls", "--path", "/nowhere/at/all"), "not a directory"),
        (("store", "purge", "--path", "/tmp"), "nothing chosen"),
        (("generate", "hi", "--recompute-ratio", "1.5"), "recompute_ratio"),
        (("generate", "hi", "--policy", "guess"), "unknown policy"),
        (("generate", "hi", "--document", "/nowhere.txt"), "cannot read document"),
        (("generate", "hi", "--model", NARROW, "--max-tokens", "0"), "max_tokens"),
        (("generate", "", "--model", NARROW), "empty"),
        (("generate", "hi", "--model", NARROW, "--max-tokens", "9000"), "8192 positions"),
        (("generate", "hi", "--model", "/nowhere/at/all"), "cannot load model"),
        (("generate", "hi", "--model", "gpt-9"), "no model 'gpt-9'"),
        (
            ("generate", "gpt-9", "hi"),
            "'hi' follows 'gpt-9'; quote a prompt with spaces, and name a model with --model",
        ),
        (("generate", "hi", "--modell", "gpt-9"), "--modell"),
        (("serve", "smollm2-135m", "--policy", "guess"), "unknown policy"),
        (("bench", "ttft", "--tier", "disk"), "choose device or host"),
    ],
)
def test_errors_are_one_line(arguments, message, smollm2_folder, narrow_folder):
    output = kvmosaic_here(*(narrow_folder if each is NARROW else each for each in arguments), check=2)
    [line] = [line for line in output.splitlines() if line.startswith("error:")]
    assert message in line


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
@pytest.mark.parametrize(
    "command", [("serve", "smollm2-135m"), ("bench", "ttft", "--tier", "host"), ("bench", "overhead")]
)
def test_without_vllm_one_line_says_how_to_get_it(command, smollm2_folder):
    [line] = [line for line in kvmosaic_here(*command, check=2).splitlines() if line.startswith("error:")]
    assert "vLLM is not installed" in line
    assert "make .venv-vllm/.serve" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_nothing_is_measured_on_one():
    assert "use --tier host" in kvmosaic_here("bench", "ttft", check=2)


def test_models_ls(smollm2_folder):
    models = {model["name"]: model["folder"] for model in kvmosaic_here("models", "ls", "--json")["models"]}
    assert models["smollm2-135m"] == str(smollm2_folder)


def test_results_go_to_stdout_and_json_is_alone_there(stored):
    command = ["store", "ls", "--path", str(stored)]
    assert "4 entries" in run_here(*command).stdout
    command = [sys.executable, "-m", "kvmosaic.cli.main", *command, "--json"]  # libraries would print when they load
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(alone.splitlines()) == 1


def test_settings_from_the_environment(tmp_path, smollm2_folder, monkeypatch):
    monkeypatch.setenv("KVMOSAIC_CHUNK_HASH_ALGORITHM", "md5")
    assert "chunk_hash_algorithm" in kvmosaic_here("generate", "hi", check=2)


def test_separator(narrow_folder):
    drawn = [kvmosaic_here("separator", narrow_folder, "--json") for _ in range(2)]
    assert drawn[0]["separator"] != drawn[1]["separator"]
    assert drawn[0]["tokens"] <= 8
    assert kvmosaic_here("separator", "--json")["tokens"] is None
