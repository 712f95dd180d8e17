"""Benchmarks, made tiny: what they print is complete and agrees with itself. Times are nobody's business here."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from xml.dom import minidom

import pytest

MODEL = ("--layers", 2, "--heads", 2, "--eager")
SMALL = ("--document-tokens", 32, "--documents", 9)
COMMANDS = {
    "throughput": (*SMALL, "--per-query", 3, "--rates", "8,2", "--seconds", 1, "--outputs", 3, "--plot", "plot.svg"),
    "sustained": (*SMALL, "--per-query", 3, "--queries", 25, "--batch", 8, "--host-share", 0.5, "--plot", "plot.svg"),
    "interference": (*SMALL, "--decoders", 3, "--turns", 2),
    "ttft": ("--context", 1024, "--tier", "host", "--ratios", "0,0.15", "--plot", "plot.svg"),
    "overhead": ("--turns", 1, "--repeats", 1, "--outputs", 4),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each command printed as JSON, and its folder. Two at a time: most of it is vLLM's start."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def run(name):
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "kvmosaic.cli.main", "bench", name, *COMMANDS[name], *MODEL, "--json"]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **cores, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), folder

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in COMMANDS}


def result(results, name):
    found, folder = results[name].result()
    assert {"device", "python", "kvmosaic", "vllm", "torch"} == set(found["machine"])
    if "--plot" in COMMANDS[name]:
        assert minidom.parse(str(folder / "plot.svg")).getElementsByTagName("polyline")
    return found, found["rows"]


def test_throughput(results):
    found, rows = result(results, "throughput")
    assert [row["rate"] for row in rows] == [2, 8]
    for row in rows:
        assert row["requests"] >= 1
        for engine in ("plain", "reuse"):
            for kind in ("ttft", "itl"):
                low, middle, high = (row[f"{engine}_{kind}_p{share}_ms"] for share in (50, 90, 99))
                assert 0 < low <= middle <= high
            assert 0 < row[f"{engine}_completed_per_s"] <= row["requests"]
            assert 0 <= row[f"{engine}_unfinished"] < row["requests"]
        assert row["reuse_hit_share"] == 1  # all were shown before
        assert row["ttft_p50_speedup"] == pytest.approx(row["plain_ttft_p50_ms"] / row["reuse_ttft_p50_ms"])
    for engine in ("plain", "reuse"):
        met = [row["rate"] for row in rows if row[f"{engine}_ttft_p90_ms"] <= found["objective_ms"]]
        assert found[f"{engine}_rate_at_objective"] == max(met, default=None)


def test_sustained(results):
    found, rows = result(results, "sustained")
    assert [(row["batch"], row["queries"]) for row in rows] == [(1, 8), (2, 8), (3, 8)]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["plain_ttft_ms"] / row["reuse_ttft_ms"])
        assert row["host_hits"] + row["device_hits"] <= row["hit_share"] * 24 + 1e-6
    assert found["last_over_second"] == pytest.approx(rows[-1]["speedup"] / rows[1]["speedup"])
    assert found["evictions"] > 0  # memory was too small for all documents
    assert 0 < rows[-1]["hit_share"] < 1


def test_interference(results):
    found, rows = result(results, "interference")
    assert [row["while"] for row in rows] == ["nothing else", "prefill", "blend"]
    for row in rows:
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert row["tokens"] % found["decoders"] == 0
    assert rows[0]["tokens"] == 20 * found["decoders"] * found["turns"]
    assert found["blend_over_prefill_p99"] == pytest.approx(rows[2]["itl_p99_ms"] / rows[1]["itl_p99_ms"])


def test_ttft(results):
    _, rows = result(results, "ttft")
    assert [(row["policy"], row["ratio"]) for row in rows] == [("none", 0), ("composite", 0.15)]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["reuse_ms"])


def test_overhead(results):
    _, rows = result(results, "overhead")
    assert [row["step"] for row in rows] == ["decode_step_ms", "prefill_ms"]
    for row in rows:
        assert row["overhead"] == pytest.approx(row["chunk_cache"] / row["plain"] - 1)
