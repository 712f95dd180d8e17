"""``kvmosaic doctor``: its row about a model's profile."""

import pytest
import torch

from kvmosaic.core.learned_sink import WITNESS_TOKENS, LearnedSink, SinkAbout
from kvmosaic.core.profile import Profile, profile_path, write_profile
from kvmosaic.models.sink_file import save_sink
from tests.cli.test_doctor import rows_of, undisturbed  # noqa: F401  # a fixture that is used by being there

pytestmark = pytest.mark.usefixtures("default_ratio")


def test_there_is_no_profile(smollm2_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path))
    verdict, found, _ = rows_of("smollm2-135m")["profile"]
    assert verdict == "ok"
    assert found.startswith("none")
    assert "kvmosaic calibrate smollm2-135m" in found


@pytest.fixture
def calibrated(smollm2_folder, monkeypatch, tmp_path):
    """Write a profile for SmolLM2 with this policy. Returns its path."""
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path))

    def write(policy):
        path = profile_path("smollm2-135m")
        write_profile(Profile(policy=policy, recompute_ratio=0.1, sink_prefix="document"), path)
        return path

    return write


def test_what_a_profile_sets(calibrated, monkeypatch):
    path = calibrated("sink-link(k=4)")
    found = f"{path} sets policy=sink-link(k=4), recompute_ratio=0.1, sink_prefix=document"
    assert rows_of("smollm2-135m")["profile"] == ("ok", found, "")
    monkeypatch.setenv("KVMOSAIC_POLICY", "composite")
    found = f"{path} sets recompute_ratio=0.1, sink_prefix=document (policy: from your settings)"
    assert rows_of("smollm2-135m")["profile"] == ("ok", found, "")


def test_a_profile_that_cannot_be_used(calibrated):
    path = calibrated("best")
    verdict, _, advice = rows_of("smollm2-135m", status=1)["profile"]
    assert verdict == "fail"
    assert str(path) in advice
    assert "unknown policy 'best'" in advice
    path.write_text("policy: 1")
    verdict, _, advice = rows_of("smollm2-135m", status=1)["profile"]
    assert verdict == "fail"
    assert str(path) in advice


def test_a_learned_sink(calibrated, monkeypatch, tmp_path):
    calibrated("composite")
    assert "learned sink" not in rows_of("smollm2-135m")
    about = SinkAbout(model="smollm2-135m", kl_before=0.25, kl_after=0.125, kvmosaic="1")
    k = torch.zeros(30, 3, 8, 64)
    save_sink(LearnedSink(k, k.clone(), torch.zeros(3, WITNESS_TOKENS, 64), about), tmp_path / "sink")
    profile = Profile(policy="composite", recompute_ratio=0.1, sink_prefix=f"learned:{tmp_path / 'sink'}")
    write_profile(profile, profile_path("smollm2-135m"))
    told = "8 tokens, learned for smollm2-135m; held-out KL 0.125, 0.250 with the default text"
    assert rows_of("smollm2-135m")["learned sink"] == ("ok", f"{tmp_path / 'sink'}: {told}", "")
    monkeypatch.setenv("KVMOSAIC_SINK_PREFIX", "learned:/nowhere")
    verdict, _, advice = rows_of("smollm2-135m", status=1)["learned sink"]
    assert (verdict, "there is no sink at /nowhere" in advice) == ("fail", True)
