"""``kvmosaic eval`` as a user meets it. In this process: starting one for every bad option would take minutes."""

import json
import sys

import pytest

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
        (("--data", "synthetic", "--ratios", "0.1;0.2"), "--ratios"),
        (("--data", "synthetic", "--ratios", "1.5"), "ratio 1.5"),
        (("--data", "synthetic", "--ratios", "nan"), "ratio nan"),
        (("--data", "synthetic", "--max-answer", 0), "--max-answer 0"),
        (("--data", "synthetic", "--html", "/nowhere/r.html"), "--html"),
        (("--data", "synthetic", "--output", "/dev/null/x"), "/dev/null"),
    ],
)
def test_bad_options_end_in_one_line(monkeypatch, capsys, smollm2_folder, options, message):
    assert kvmosaic_eval(monkeypatch, "smollm2-135m", *options) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in line


def test_rows_come_as_json_and_again_without_work(monkeypatch, capsys, tmp_path, smollm2_folder):
    data = tmp_path / "own.jsonl"
    record = {"system": "Be brief.", "chunks": ["Anna has a cat.", "Bert has a dog."], "question": "Who has a dog?"}
    data.write_text(json.dumps({**record, "answers": ["Bert"]}))
    options = ("--data", data, "--policies", "sink-link(k=2)", "--ratios", "0.3", "--max-answer", 2)
    results = []
    for _ in range(2):
        files = ("--output", tmp_path / "out", "--html", tmp_path / "report.html", "--json")
        assert kvmosaic_eval(monkeypatch, "smollm2-135m", *options, *files) == 0
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
    names = "policy ratio charged_ratio kl_mean kl_p95 top1 em f1 gap_closed prefill_ms n"
    assert all(list(row) == names.split() for row in rows)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
