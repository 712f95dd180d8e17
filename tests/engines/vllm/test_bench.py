"""Benchmarks at tiny sizes: their output is complete and consistent. Times do not matter here."""

import json
import os
import subprocess
import sys
from importlib import import_module
from xml.dom import minidom

import pytest
from typer.testing import CliRunner

from kvmosaic.bench import interference, overhead, process
from kvmosaic.cli.main import app

pytestmark = pytest.mark.engine

MODEL = ("--layers", 2, "--heads", 2, "--eager")
SMALL = ("--document-tokens", 32, "--documents", 9)
QUERIES = (*SMALL, "--per-query", 3, "--plot", "plot.svg")
COMMANDS = {
    "throughput": (
        *QUERIES,
        "--new-per-query",
        1,
        "--rates",
        "8,2",
        "--ratios",
        "0,0.5",
        "--seconds",
        1,
        "--outputs",
        3,
    ),
    "sustained": (*QUERIES, "--queries", 25, "--batch", 8, "--host-share", 0.5),
    "interference": (*SMALL, "--decoders", 3, "--turns", 2),
    "ttft": ("--context", 1024, "--tier", "host", "--ratios", "0,0.15", "--plot", "plot.svg"),
    "overhead": ("--turns", 1, "--repeats", 1, "--outputs", 4),
}


@pytest.fixture
def in_one_process(monkeypatch):
    """Run measurements in this process, which has vLLM imported, instead of separate ones."""

    def run_here(module, arguments, progress):
        measured = import_module(module).measure(**json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(measured))

    for module in (process, interference, overhead):
        monkeypatch.setattr(module, "run_apart", run_here)


def command(name):
    return ["bench", name, *map(str, (*COMMANDS[name], *MODEL)), "--json"]


def measure(name, tmp_path, monkeypatch):
    """The JSON that a command prints, and its rows."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command(name), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return complete(name, done.stdout, tmp_path)


def complete(name, said, folder):
    found = json.loads(said.splitlines()[-1])
    assert {"device", "python", "kvmosaic", "vllm", "torch"} == set(found["machine"])
    if "--plot" in COMMANDS[name]:
        assert minidom.parse(str(folder / "plot.svg")).getElementsByTagName("polyline")
    return found, found["rows"]


def test_throughput(tmp_path):
    """Run the command as users do, with its separate processes."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "kvmosaic.cli.main", *command("throughput")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found, rows = complete("throughput", done.stdout, tmp_path)
    kinds = [(engine, ratio) for engine, ratio in (("plain", None), ("reuse", 0), ("reuse", 0.5)) for _ in range(2)]
    assert [(row["engine"], row["ratio"]) for row in rows] == kinds
    assert [row["rate"] for row in rows] == [2, 8] * 3
    for row in rows:
        assert row["requests"] == rows[row["rate"] == 8]["requests"] >= 1
        for kind in ("ttft", "itl"):
            low, middle, high = (row[f"{kind}_p{share}_ms"] for share in (50, 90, 99))
            assert 0 < low <= middle <= high
        assert 0 < row["completed_per_s"] <= row["requests"]
        assert 0 <= row["unfinished"] < row["requests"]
        if row["engine"] == "reuse":
            assert row["hit_share"] == pytest.approx(2 / 3)  # all but the new one were sent before
    for name, engine in (("plain", rows[:2]), ("reuse 0%", rows[2:4]), ("reuse 50%", rows[4:])):
        met = [row["rate"] for row in engine if row["ttft_p90_ms"] <= found["objective_ms"]]
        assert found["rate_at_objective"][name] == max(met, default=None)


def test_sustained(in_one_process, tmp_path, monkeypatch):
    found, rows = measure("sustained", tmp_path, monkeypatch)
    assert [(row["batch"], row["queries"]) for row in rows] == [(1, 8), (2, 8), (3, 8)]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["plain_ttft_ms"] / row["reuse_ttft_ms"])
        assert row["host_hits"] + row["device_hits"] <= row["hit_share"] * 24 + 1e-6
    assert found["last_over_second"] == pytest.approx(rows[-1]["speedup"] / rows[1]["speedup"])
    assert found["evictions"] > 0  # memory was too small for all documents
    assert 0 < rows[-1]["hit_share"] < 1


def test_interference(in_one_process, tmp_path, monkeypatch):
    found, rows = measure("interference", tmp_path, monkeypatch)
    assert [row["while"] for row in rows] == ["nothing else", "prefill", "blend"]
    for row in rows:
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert row["tokens"] % found["decoders"] == 0
    assert rows[0]["tokens"] == 20 * found["decoders"] * found["turns"]
    assert found["blend_over_prefill_p99"] == pytest.approx(rows[2]["itl_p99_ms"] / rows[1]["itl_p99_ms"])


def test_ttft(in_one_process, tmp_path, monkeypatch):
    _, rows = measure("ttft", tmp_path, monkeypatch)
    assert [(row["policy"], row["ratio"]) for row in rows] == [("none", 0), ("composite", 0.15)]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["reuse_ms"])


def test_overhead(in_one_process, tmp_path, monkeypatch):
    _, rows = measure("overhead", tmp_path, monkeypatch)
    assert [row["step"] for row in rows] == ["decode_step_ms", "prefill_ms"]
    for row in rows:
        assert row["overhead"] == pytest.approx(row["chunk_cache"] / row["plain"] - 1)
