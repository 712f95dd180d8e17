"""The sentence on top of a report."""

import inspect

import pytest

from kvmosaic.cli.calibrate import calibrate
from kvmosaic.eval.advice import USUAL, sentence
from kvmosaic.eval.base import Row
from kvmosaic.eval.metrics import Interval
from kvmosaic.eval.summary import Reference, Summary, SummaryLine

ANY = Interval(0.0, 0.0, 0.0)


def line(policy, ratio, kl, top1=0.95, sink="document", ms=100.0, n=25):
    row = Row(policy, ratio, ratio, kl, 2 * kl, top1, 0.5, 0.6, None, ms, n)
    return SummaryLine(row, ANY, ANY, ANY, ANY, sink, "auto")


def summary(*lines):
    return Summary(lines, Reference(0.6, 0.7, 492.0), Reference(0.1, 0.2, 10.0))


def test_the_cheapest_that_is_close_enough_is_named():
    told = sentence(
        summary(
            line("none", 0.0, 0.09),
            line("random", 0.05, 0.04),
            line("composite", 0.15, 0.03, ms=115.0),
            line("composite", 0.3, 0.01),
            line("all", 1.0, 0.0),
        )
    )
    assert told.startswith("Choose policy composite at ratio 0.15: ")
    assert "its median first token takes 115 ms instead of 492" in told
    assert "no faster" not in told
    assert "KL 0.030" in told


@pytest.mark.parametrize("ms", [492.3, 5733.0])
def test_a_gain_that_was_not_measured_is_not_told(ms):
    told = sentence(summary(line("composite", 0.15, 0.03, ms=ms)))
    assert (
        f"no faster in this run: its median first token takes {ms:.0f} ms, and that of a full prefill 492 ms." in told
    )
    assert "instead of" not in told


@pytest.mark.parametrize("kl", [0.03, 0.5])
def test_few_examples_are_no_reason_to_choose(kl):
    assert sentence(summary(line("none", 0.0, kl, n=3))).startswith(
        "Only 3 examples were measured; measure 25 or more before you choose. "
    )
    assert "Only" not in sentence(summary(line("none", 0.0, kl, n=25)))


def test_nothing_recomputed_may_be_enough():
    assert sentence(summary(line("none", 0.0, 0.02), line("composite", 0.15, 0.01))).startswith("Choose ratio 0, ")


@pytest.mark.parametrize(("kl", "top1"), [(0.2, 0.95), (0.01, 0.5)])
def test_nothing_may_be_close_enough(kl, top1):
    told = sentence(summary(line("none", 0.0, 0.3, 0.4), line("sink-link(k=2)", 0.15, kl, top1), line("all", 1.0, 0)))
    assert told.startswith("Nothing measured here")
    assert "closest is policy sink-link(k=2) at ratio 0.15 (KL" in told


def test_a_sink_prefix_is_named_where_several_were_tried():
    told = sentence(summary(line("none", 0.0, 0.3, sink="bos"), line("none", 0.0, 0.02, sink="learned:my.sink")))
    assert "with the sink prefix learned:my.sink" in told


def test_targets_are_those_of_calibrate():
    defaults = {name: each.default for name, each in inspect.signature(calibrate).parameters.items()}
    assert (defaults["max_kl"], defaults["min_top1"]) == USUAL
