"""Profiles are found by a model's name, have the lowest precedence, and cause one line when they are broken."""

import pytest

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import (
    SHIPPED,
    Measured,
    Profile,
    Targets,
    find_profile,
    load_profile,
    profile_path,
    read_profile,
    write_profile,
)
from kvmosaic.models import CATALOG
from kvmosaic.models.sink_file import load_sink

pytestmark = pytest.mark.usefixtures("default_ratio")

SETTINGS = {"policy": "sink-link(k=4)", "recompute_ratio": 0.1, "sink_prefix": "document"}
ON = {"enable_chunk_cache": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def written(folder):
    write_profile(Profile(**SETTINGS), profile_path("some-model"))
    return folder / "some-model.yaml"


def chosen(config):
    return {name: getattr(config, name) for name in SETTINGS}


def test_what_is_written_is_read_and_always_the_same(folder):
    profile = Profile(
        model="m",
        **SETTINGS,
        measured=Measured(kl_mean=0.01, top1=0.98, charged_ratio=0.09, n=3),
        targets=Targets(max_kl=0.05, min_top1=0.9),
        data="synthetic",
        seed=0,
        kvmosaic="0.1",
    )
    write_profile(profile, profile_path("m"))
    assert load_profile(profile_path("m")) == SETTINGS
    first = profile_path("m").read_bytes()
    write_profile(profile, profile_path("m"))
    assert profile_path("m").read_bytes() == first
    assert list(folder.iterdir()) == [folder / "m.yaml"]


@pytest.mark.parametrize("model", ["some-model", "org/some-model", "/a/folder/some-model", "some-model/"])
def test_a_model_is_known_by_the_last_part_of_its_name(written, model):
    assert profile_path(model) == written
    assert load_profile(find_profile(model)) == SETTINGS


def test_a_folder_may_be_the_current_one(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert profile_path(".") == folder / f"{tmp_path.name}.yaml"


def test_no_profile_no_settings(folder):
    assert find_profile("some-model") is None
    assert load_profile(None) == load_profile(profile_path("some-model")) == {}
    assert load_config("some-model", **ON) == load_config(**ON)


def test_it_is_below_everything_else(written, tmp_path, monkeypatch):
    assert chosen(load_config("some-model", **ON)) == SETTINGS
    (tmp_path / "settings.yaml").write_text("recompute_ratio: 0.2\nsink_prefix: none\n")
    monkeypatch.setenv("KVMOSAIC_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("KVMOSAIC_RECOMPUTE_RATIO", "0.3")
    config = load_config("some-model", **ON)
    assert chosen(config) == {"policy": "sink-link(k=4)", "recompute_ratio": 0.3, "sink_prefix": "none"}
    # A value counts as given also when it is the default.
    config = load_config("some-model", policy="composite", sink_prefix="bos", **ON)
    assert chosen(config) == {"policy": "composite", "recompute_ratio": 0.3, "sink_prefix": "bos"}


def test_a_sink_may_be_named_relative_to_its_profile(folder):
    write_profile(Profile(**SETTINGS | {"sink_prefix": "learned:a.sink"}), profile_path("some-model"))
    assert load_config("some-model", **ON).sink_prefix == f"learned:{folder / 'a.sink'}"
    write_profile(Profile(**SETTINGS | {"sink_prefix": "learned:/b/a.sink"}), profile_path("some-model"))
    assert load_config("some-model", **ON).sink_prefix == "learned:/b/a.sink"


def test_profiles_that_come_with_the_package_are_below_the_users(folder, monkeypatch):
    usual, [shipped, *_] = load_config(**ON), sorted(SHIPPED.glob("*.yaml"))
    assert load_config(shipped.stem, **ON) == usual  # because the variable is set
    monkeypatch.delenv("KVMOSAIC_PROFILES_DIR")
    monkeypatch.setattr("platformdirs.user_config_dir", lambda name: str(folder.parent))
    monkeypatch.setenv("KVMOSAIC_MODELS_DIR", str(folder.parent / "models"))
    config = load_config(str(folder.parent / "models" / shipped.stem), **ON)
    assert chosen(config) == chosen(load_config(shipped.stem, **ON)) == load_profile(shipped)
    for other in (f"owner/{shipped.stem}", f"/some/folder/{shipped.stem}"):  # with weights of its own
        assert load_config(other, **ON) == usual
    assert (config.policy, config.recompute_ratio) == (usual.policy, usual.recompute_ratio)
    assert load_config(shipped.stem, sink_prefix="document", **ON).sink_prefix == "document"
    write_profile(Profile(**SETTINGS), profile_path(shipped.stem))
    assert chosen(load_config(shipped.stem, **ON)) == SETTINGS


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_profiles_that_come_with_the_package_have_their_sinks(path):
    profile = read_profile(path)
    assert profile is not None
    sink = load_sink(load_profile(path)["sink_prefix"].removeprefix("learned:"))
    assert profile.model == sink.about.model == path.stem
    assert path.stem in CATALOG
    assert sink.about.kl_after < sink.about.kl_before


def test_it_is_for_the_chunk_cache_only(written):
    assert chosen(load_config("some-model")) == chosen(load_config())


def test_a_complete_configuration_is_taken_as_it_is(written):
    """The settings that a front end passes to the connector include the profile already."""
    complete = load_config(**ON).model_dump(mode="json")
    assert chosen(load_config("some-model", **complete)) == chosen(load_config())
    written.write_text("broken")
    load_config("some-model", **complete)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b\n", "content"),
        ("just text", "content"),
        ("", "content"),
        ("a: [b\n", "parsing"),
        ("policy: composite\nsink_prefix: bos\n", "recompute_ratio"),
        ("policy: composite\nsink_prefix: bos\nrecompute_ratio: 1.5\n", "recompute_ratio"),
        ("policy: composite\nsink_prefix: bos\nrecompute_ratio: true\n", "recompute_ratio"),
        ("policy: composite\nsink_prefix: no\nrecompute_ratio: 0\n", "sink_prefix"),
        ("policy: \nsink_prefix: bos\nrecompute_ratio: 0\n", "policy"),
    ],
)
def test_a_broken_one_is_one_line_that_names_it(written, text, reason):
    written.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("some-model", **ON)
    assert str(written) in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_one_that_cannot_be_read(folder):
    profile_path("some-model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="some-model"):
        load_profile(profile_path("some-model"))
    profile_path("other").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="other"):
        load_profile(profile_path("other"))


def test_keys_of_a_later_version_are_no_reason_to_fail(written):
    written.write_text(written.read_text() + "start_up_gate: 3\n")
    assert load_profile(profile_path("some-model")) == SETTINGS


def test_an_error_about_the_policy_says_which_profile_it_is_from(written):
    error = ConfigError("unknown policy 'best'")
    blamed = load_config("some-model", **ON).blame(error)
    assert "unknown policy 'best'" in str(blamed)
    assert str(written) in str(blamed)
    assert "\n" not in str(blamed)
    # Users who name the policy themselves know where it is from.
    assert load_config("some-model", policy="best", **ON).blame(error) is error
    assert load_config(**ON).blame(error) is error
