"""Measurements in separate processes."""

import os

import pytest

from kvmosaic.bench.process import compare, run_apart
from kvmosaic.core.errors import KvmosaicError

CHILD = "tests.bench.child"


def test_it_is_another_process_and_tells_what_it_does():
    told = []
    result = run_apart(CHILD, {"way": "return"}, told.append)
    assert result["pid"] != os.getpid()
    assert told == ["going to return"]


@pytest.mark.timeout(60)
def test_threads_that_go_on_do_not_hold_up_the_result():
    """Those of LMCache do."""
    assert run_apart(CHILD, {"way": "linger"}, print)["pid"] != os.getpid()


def test_both_engines_are_measured_one_after_the_other():
    told = []
    results = compare(CHILD, {"way": "return"}, told.append)
    assert {name: result["engine"] for name, result in results.items()} == {"plain": "plain", "reuse": "reuse"}
    assert told == ["plain: going to return", "reuse: going to return"]


@pytest.mark.parametrize(("way", "line"), [("fail", "^this cannot work "), ("die", "^status 3 ")])
def test_a_failure_is_one_line_that_says_where_there_is_more(way, line, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KvmosaicError, match=line) as caught:
        run_apart(CHILD, {"way": way}, print)
    [log] = tmp_path.iterdir()
    assert str(caught.value).endswith(f"its output is in {log})")
    assert "\n" not in str(caught.value)
    assert "vLLM says something" in log.read_text()
    assert ("Traceback" in log.read_text()) == (way == "fail")
