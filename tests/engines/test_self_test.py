"""The gate's judgement, and the prompt it is made on."""

import pytest
import torch

from kvmosaic.engines.self_test import ATTEMPTS, SHIFT, failure, trial_prompts


class FakeTrial:
    """Right outputs ``[tokens, width]``, and outputs with errors of given sizes."""

    def __init__(self, recomputed=0.0, moved=0.0, rounding=0.0, int8=None):
        self._right = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
        self._errors = {"recomputed": recomputed, "moved": moved, "rounding": rounding, "int8": int8}

    def _with(self, error):
        noise = torch.randn(self._right.shape, generator=torch.Generator().manual_seed(1))
        return self._right + self._errors[error] * noise

    def recomputed(self):
        return self._with("recomputed")

    def moved(self):
        return self._with("moved")

    def in_8_bits(self):
        return None if self._errors["int8"] is None else self._with("int8")

    def prefill(self, shift):
        return self._with("rounding") if shift else self._right

    in_place = prefill


def test_exact_is_well():
    assert failure([FakeTrial()], torch.float32) is None
    assert failure([FakeTrial(recomputed=1e-4, moved=1e-4)], torch.float32) is None


@pytest.mark.parametrize("wrong", ["recomputed", "moved"])
def test_errors_count_in_units_of_rounding(wrong):
    assert failure([FakeTrial(**{wrong: 0.06}, rounding=0.03)], torch.bfloat16) is None
    line = failure([FakeTrial(**{wrong: 0.1}, rounding=0.03)], torch.bfloat16)
    assert "10." in line
    assert "7." in line  # rounding explains this
    assert failure([FakeTrial(**{wrong: 0.02})], torch.bfloat16) is None  # too small to be judged
    assert failure([FakeTrial(**{wrong: 0.02})], torch.float32) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_token_counts(dtype):
    """The first token of an answer comes from it."""
    trial = FakeTrial()
    right = trial.moved()
    trial.moved = lambda: torch.cat([right[:-1], -right[-1:]])
    assert failure([trial], dtype) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_in_8_bits_may_be_off_by_their_rounding(dtype):
    assert failure([FakeTrial(int8=0.03)], dtype) is None
    assert "entry_dtype=auto" in failure([FakeTrial(int8=0.5)], dtype)
    assert failure([FakeTrial(int8=float("nan"))], dtype) is not None


def test_one_prompt_that_goes_well_is_enough():
    unlucky = FakeTrial(moved=0.5)
    assert failure([unlucky, unlucky, FakeTrial()], torch.float32) is None
    assert failure([unlucky, unlucky, unlucky], torch.float32) is not None


def test_no_number_is_no_good():
    assert "nan" in failure([FakeTrial(moved=float("nan"))], torch.float32)


def test_what_raises_is_refused():
    trial = FakeTrial()
    trial.moved = lambda: 1 / 0
    assert failure([trial], torch.float32) == "self-test failed: ZeroDivisionError: division by zero"
    with pytest.raises(ZeroDivisionError):  # other ranks would wait for this one
        failure([trial], torch.float32, ranks=2)


@pytest.mark.parametrize("limit", [None, 200, 64, 30, 20])
def test_prompts_fit(limit):
    prompts = trial_prompts(context_tokens=3, vocabulary=50, limit=limit)
    assert len({prompt.token_ids for prompt in prompts}) == ATTEMPTS
    for prompt in prompts:
        assert len(prompt.chunks) == 2
        assert prompt.chunks[0].start > 3
        assert set(prompt.token_ids) <= set(range(50))
        assert limit is None or len(prompt.token_ids) + SHIFT <= limit


def test_no_prompt_fits():
    assert trial_prompts(context_tokens=3, vocabulary=50, limit=10) == []
    assert failure([], torch.float32) is None
