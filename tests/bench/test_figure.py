"""The README's figure is the one that the command draws from the measured numbers."""

import json
import re
from pathlib import Path

import pytest

from kvmosaic.bench.figure import Measured, draw, read
from kvmosaic.core.errors import ConfigError
from tests.cli.command import run_here

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
MEASURED = FIGURES / "first-token.json"


def test_the_committed_figure_is_drawn_from_the_committed_numbers(tmp_path):
    made = run_here("bench", "figure", MEASURED, "--output", tmp_path / "made.svg")
    assert (made.returncode, made.stderr) == (0, "")
    assert (tmp_path / "made.svg").read_text() == (FIGURES / "first-token.svg").read_text()


def test_every_number_says_how_it_was_measured():
    for run in read(MEASURED).runs.values():
        assert run.command
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date)
        assert "vllm" in run.versions
    assert {row.run for row in read(MEASURED).rows} == set(read(MEASURED).runs)


def test_bars_are_as_long_as_times_and_compared_with_their_own_run():
    fields = json.loads(MEASURED.read_text())
    run = {**fields["runs"]["kvmosaic"], "full_prefill_ms": 500}
    bar = {"detail": "<&>", "kind": "ours", "run": "one"}
    rows = [{"name": "a", "ms": 500, **bar}, {"name": "b", "ms": 100, **bar}, {"name": "c", "ms": 40, **bar}]
    svg = draw(Measured(title="t", subtitle="s", runs={"one": run}, rows=rows))
    lengths = [float(length) for length in re.findall(r'class="ours" [^>]*width="([0-9.]+)"', svg)]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1, 0.2, 0.08], abs=1e-3)
    assert re.findall(r"(\d+ ms)<tspan[^>]*> *([0-9.]*×)", svg) == [
        ("500 ms", "1.0×"),
        ("100 ms", "5.0×"),
        ("40 ms", "12×"),
    ]
    assert "&lt;&amp;&gt;" in svg


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": []}, "rows"),
        ({"runs": {}}, "which the file does not have"),
        ({"more": 1}, "more"),
        ({"title": 5}, "title"),
    ],
)
def test_a_file_that_cannot_be_drawn(tmp_path, change, reason):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(json.loads(MEASURED.read_text()) | change))
    with pytest.raises(ConfigError, match=reason) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "text").write_text("no JSON")
    for path in (tmp_path / "missing", tmp_path / "text"):
        assert run_here("bench", "figure", path, "--output", tmp_path / "made.svg").returncode == 2
    assert run_here("bench", "figure", MEASURED, "--output", tmp_path / "made.png").returncode == 2
