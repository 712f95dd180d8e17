"""The first lines of a test run."""

import pytest

from tests import conftest, seeds


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_says_when_tests_of_vllm_are_left_out(monkeypatch, is_there):
    """They are not collected then, so nothing else would show it."""
    monkeypatch.setattr(conftest, "find_spec", lambda name: object() if is_there else None)
    seed, *more = conftest.pytest_report_header()
    assert str(seeds.SESSION) in seed
    assert len(more) == (not is_there)
    assert is_there or "tests/engines/vllm" in more[0]
