"""``kvmosaic eval`` as users run it, but in this process, because starting one for every bad option would take
minutes."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from kvmosaic.cli.eval import check_file
from kvmosaic.cli.main import main


def kvmosaic_eval(monkeypatch, *arguments):
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["kvmosaic", "eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "/nowhere"), "cannot read data"),
        (("--data", "synthetic", "--limit", 0), "--limit 0"),
        (("--data", "synthetic", "--format", "xml"), "--format xml"),
        (("--data", "synthetic", "--format", "nq"), "leave --format out"),
        (("--data", "synthetic", "--policies", "best"), "unknown policy 'best'"),
        (("--data", "synthetic", "--policies", "sink-link(k=x)"), "sink-link"),
        (("--data", "synthetic", "--policies", ""), "unknown policy ''"),
        (("--data", "synthetic", "--policies", "composite("), "options go in brackets"),
        (("--data", "synthetic", "--policies", "composite(first=1, first=2)"), "first is given twice"),
        (("--data", "synthetic", "--policies", "kv-deviation(layers=5+2)"), "error: kv-deviation: layers=(5, 2)"),
        (("--data", "synthetic", "--seed", -1), "--seed -1"),
        (("--data", "synthetic", "--ratios", "0.1;0.2"), "--ratios"),
        (("--data", "synthetic", "--ratios", "1.5"), "--ratios 1.5"),
        (("--data", "synthetic", "--ratios", "-0.1"), "--ratios -0.1"),
        (("--data", "synthetic", "--ratios", "nan"), "--ratios nan"),
        (("--data", "synthetic", "--policies", "kv-deviation(layers=99)"), "layer 99"),
        (("--data", "synthetic", "--sink-prefix", ""), "--sink-prefix"),
        (("--data", "synthetic", "--chunk-sources", "parts"), "--chunk-sources parts"),
        (("--data", "synthetic", "--max-answer", 0), "--max-answer 0"),
        (("--data", "synthetic", "--html", "/nowhere/r.html"), "--html"),
        (("--data", "synthetic", "--html", "/tmp"), "--html"),
        (("--data", "synthetic", "--html", "/proc/r.html"), "--html"),
        (("--data", "synthetic", "--output", "/dev/null/x"), "--output /dev/null/x"),
        (("--data", "synthetic", "--output", "/dev/null"), "--output /dev/null"),
        (("--data", "synthetic", "--output", "/proc/x"), "--output /proc/x"),
    ],
)
def test_bad_options_end_in_one_line(monkeypatch, capsys, narrow_folder, options, message):
    assert kvmosaic_eval(monkeypatch, narrow_folder, *options) == 2
    output = capsys.readouterr()
    assert output.out == ""  # nothing was measured
    [line] = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert message in line


def test_a_file_to_come_is_not_made_early(tmp_path):
    check_file("--html", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("kept")
    check_file("--html", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_it_says_so_and_goes_on_where_it_stopped(tmp_path, narrow_folder):
    command = [
        sys.executable,
        "-m",
        "kvmosaic.cli.main",
        "eval",
        str(narrow_folder),
        "--data",
        "synthetic",
        "--limit",
        "3",
        "--max-answer",
        "4",
    ]
    command += ["--policies", "sink-link", "--ratios", "0.15", "--output", str(tmp_path), "--json"]
    results = tmp_path / "results.jsonl"

    def measured():
        return results.read_bytes().splitlines() if results.exists() else []

    # A shell's background jobs ignore Ctrl-C, and so do the processes that they start.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    while running.poll() is None and len(measured()) < 4:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert "interrupted; finished work is kept" in err
    kept = measured()
    assert 4 <= len(kept) < 1 + 3 * 6
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert measured()[: len(kept)] == kept
    assert {row["n"] for row in json.loads(done.stdout)["rows"]} == {3}


def test_rows_come_as_json_and_again_without_work(monkeypatch, capsys, tmp_path, narrow_folder):
    data = tmp_path / "own.jsonl"
    record = {"system": "Be brief.", "chunks": ["Anna has a cat.", "Bert has a dog."], "question": "Who has a dog?"}
    data.write_text(json.dumps({**record, "answers": ["Bert"]}))
    options = ("--data", data, "--policies", "sink-link(k=2)", "--ratios", "0.3", "--max-answer", 2)
    results = []
    for _ in range(2):
        files = ("--output", tmp_path / "out", "--html", tmp_path / "report.html", "--json")
        assert kvmosaic_eval(monkeypatch, narrow_folder, *options, *files) == 0
        [line] = capsys.readouterr().out.splitlines()
        results.append(json.loads(line))
    assert results[0] == results[1]
    rows = results[0]["rows"]
    assert [(row["policy"], row["ratio"]) for row in rows] == [
        ("none", 0.0),
        ("random", 0.3),
        ("sink-link(k=2)", 0.3),
        ("all", 1.0),
    ]
    names = "sink_prefix entry_dtype policy ratio charged_ratio kl_mean kl_p95 top1 em f1 gap_closed prefill_ms n"
    assert all(list(row) == names.split() for row in rows)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
