"""``kvmosaic calibrate``: its choice, the profile that it writes, and that engines use that."""

import json
import math
import sys
from functools import partial

import pytest
import yaml

from kvmosaic import __version__
from kvmosaic.cli.calibrate import _default_sinks
from kvmosaic.cli.main import main
from kvmosaic.core.profile import profile_path, sink_path
from kvmosaic.eval.base import Cell, Row
from kvmosaic.eval.calibrate import Candidate, Target, advice, candidate_cells, cheapest, closest, profile_of
from kvmosaic.hf import LLM

TARGET = Target(max_kl=0.05, min_top1=0.9)


def made(sink, policy, ratio, charged, kl, top1=1.0):
    return Candidate(sink, Row(policy, ratio, charged, kl, kl, top1, 0.0, 0.0, None, 1.0, 2))


@pytest.mark.parametrize(("kl", "top1"), [(math.nan, 1.0), (0.0, math.nan)])
def test_what_is_not_a_number_meets_no_target(kl, top1):
    assert TARGET.missed_by(made("document", "composite", 0.1, 0.1, kl, top1).row) == 1


def test_the_cheapest_that_is_good_enough():
    reused = made("bos", "none", 0.0, 0.0, 0.2, 0.8)
    dear, cheap = made("bos", "composite", 0.3, 0.29, 0.001), made("bos", "composite", 0.1, 0.1, 0.05, 0.9)
    assert cheapest([reused, dear, cheap], TARGET) is cheap
    assert cheapest([reused, dear, cheap], Target(0.01, 0.9)) is dear
    assert cheapest([reused], TARGET) is None
    # Both must be met.
    assert cheapest([made("bos", "composite", 0.1, 0.1, 0.01, 0.89)], TARGET) is None
    assert cheapest([made("bos", "composite", 0.1, 0.1, 0.051)], TARGET) is None


def test_what_costs_about_the_same_is_told_apart_by_kl():
    worse = made("bos", "sink-link", 0.05, 0.0485, 0.04)
    better = made("document", "composite", 0.05, 0.0493, 0.02)
    assert cheapest([worse, better], TARGET) is better
    assert cheapest([made("bos", "none", 0, 0, 0.04), made("none", "none", 0, 0, 0.03)], TARGET).sink_prefix == "none"


def test_closest_and_what_to_ask_for():
    both, one = made("bos", "none", 0.0, 0.0, 0.06, 0.8), made("bos", "composite", 0.3, 0.3, 0.0712345, 0.95)
    assert closest([both, one], TARGET) is one
    assert advice(one, TARGET).endswith("--max-kl 0.0713")
    assert advice(both, TARGET).endswith("--max-kl 0.06 --min-top1 0.8")


def test_recomputing_everything_is_no_candidate_and_nothing_always_is():
    assert candidate_cells(["composite", "none", "all"], [0.0, 0.3]) == (Cell("none", 0.0), Cell("composite", 0.3))
    assert Cell("random", 0.3) in candidate_cells(["random"], [0.3])


def test_a_profile_without_recomputing_does_not_switch_policies_off():
    profile = profile_of("org/m", made("document", "none", 0.0, 0.0, 0.01), TARGET, ["sink-link"], "synthetic", 0)
    assert (profile.model, profile.policy, profile.recompute_ratio) == ("m", "sink-link", 0.0)


def calibrate(monkeypatch, *arguments, model="smollm2-135m"):
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", ["kvmosaic", "calibrate", str(model), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


@pytest.mark.parametrize(
    "options",
    [
        ("--data", "/nowhere"),
        ("--limit", 0),
        ("--policies", "best"),
        ("--ratios", "1"),
        ("--ratios", "x"),
        ("--max-kl", -1),
        ("--max-kl", "nan"),
        ("--min-top1", 1.1),
        ("--sink-prefixes", "bos,,none"),
        ("--profile", "/nowhere/p.yaml"),
        ("--profile", "/"),
        ("--profile", "/proc/p.yaml"),
        ("--output", "/dev/null/x"),
        ("--policies", "sink-link(k=x)"),
        ("--ratios", "nan"),
        ("--limit", -1),
    ],
)
def test_bad_options_end_in_one_line(monkeypatch, capsys, options):
    assert calibrate(monkeypatch, *options) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert str(options[1]).partition("(")[0] in line


@pytest.fixture
def data(tmp_path, monkeypatch):
    """One small example, and a folder of profiles for this test."""
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path / "profiles"))
    record = {"system": "Be brief.", "chunks": ["Anna has a cat.", "Bert has a dog."], "question": "Who has a dog?"}
    (tmp_path / "own.jsonl").write_text(json.dumps({**record, "answers": ["Bert"]}))
    return tmp_path / "own.jsonl"


def test_a_learned_sink_is_one_more_choice(data):
    assert _default_sinks("some/model") == ["bos", "none", "document"]
    learned = sink_path("some/model")
    learned.parent.mkdir()
    learned.touch()
    assert _default_sinks("some/model") == [f"learned:{learned}", "bos", "none", "document"]


@pytest.mark.slow
@pytest.mark.usefixtures("default_ratio")
def test_what_it_chooses_is_what_the_engine_does(monkeypatch, capsys, data, tmp_path, narrow_folder, tokenizer):
    path, run = profile_path(str(narrow_folder)), partial(calibrate, monkeypatch, model=narrow_folder)
    options = ("--data", data, "--policies", "sink-link", "--ratios", "0.3", "--sink-prefixes", "bos,document")
    options = (*options, "--output", tmp_path / "out", "--json")

    assert run(*options, "--max-kl", 0, "--min-top1", 1) == 1
    output = capsys.readouterr()
    assert "nothing meets KL <= 0 and top-1 >= 1; closest: sink-link at ratio 0.3" in output.err
    result = json.loads(output.out)
    assert (result["chosen"], result["profile"]) == (None, None)
    rows = result["rows"]
    assert [(row["sink_prefix"], row["policy"]) for row in rows] == [
        (sink, policy) for sink in ("bos", "document") for policy in ("none", "sink-link")
    ]
    assert rows[0]["kl_mean"] != rows[2]["kl_mean"]
    assert not path.exists()

    # A broken profile does not prevent a new one, and nothing is measured twice.
    path.parent.mkdir()
    path.write_text("broken")
    wanted = min(row["kl_mean"] for row in rows)
    assert run(*options, "--max-kl", wanted, "--min-top1", 0) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == rows
    assert result["profile"] == str(path)
    best = min(rows, key=lambda row: row["kl_mean"])
    assert result["chosen"] == best
    assert yaml.safe_load(path.read_text()) == {
        "model": "narrow",
        "policy": "sink-link",
        "recompute_ratio": best["ratio"],
        "sink_prefix": best["sink_prefix"],
        "measured": {
            **{name: pytest.approx(best[name], abs=1e-6) for name in ("kl_mean", "top1", "charged_ratio")},
            "n": 1,
        },
        "targets": {"max_kl": wanted, "min_top1": 0.0},
        "data": str(data),
        "seed": 0,
        "kvmosaic": __version__,
    }

    with LLM(str(narrow_folder), enable_chunk_cache=True) as llm:
        assert llm.config.policy == "sink-link"
        assert (llm.config.recompute_ratio, llm.config.sink_prefix) == (best["ratio"], best["sink_prefix"])
    with LLM(str(narrow_folder), enable_chunk_cache=True, recompute_ratio=0.2, sink_prefix="bso") as llm:
        assert (llm.config.policy, llm.config.recompute_ratio) == ("sink-link", 0.2)
        assert list(llm.chunk_cache.sink) == tokenizer.encode("bso", add_special_tokens=False)
