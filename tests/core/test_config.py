"""Settings: keyword, environment, YAML, default; one-line errors."""

import pytest

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.remote_url import RemoteUrl


def test_defaults():
    config = load_config()
    assert (config.enable_chunk_cache, config.chunk_separator, config.chunk_hash_algorithm) == (
        False,
        " # # ",
        "xxhash",
    )


def test_precedence(monkeypatch, tmp_path):
    file = tmp_path / "kvmosaic.yaml"
    file.write_text("chunk_separator: from-yaml\nhost_memory: 1GiB\ntenant: yaml\n")
    monkeypatch.setenv("KVMOSAIC_CONFIG", str(file))
    monkeypatch.setenv("KVMOSAIC_CHUNK_SEPARATOR", "from-env")
    config = load_config(tenant="keyword")
    assert (config.tenant, config.chunk_separator, config.host_memory) == ("keyword", "from-env", 2**30)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_hash_algorithm": "md5"},
        {"recompute_ratio": 1.5},
        {"host_memory": "many"},
        {"chunk_separator": ""},
        {"no_such_setting": 1},
        {"chunk_context": "everything"},
        {"tenant": ""},
        {"remote": "http://host"},
        {"remote": "valkey://"},
        {"remote": "valkey://host:port"},
        {"remote": "valkey://host/zero"},
        {"remote": "valkey://user:secret@host"},
        {"remote": "valkey://host?db=1"},
        {"remote": "mooncake://host/0"},
        {"remote": "mooncake://host?metrics_port=x"},
        {"remote_deadline_ms": 0},
    ],
)
def test_wrong_settings_are_one_line_that_names_them(settings):
    with pytest.raises(ConfigError) as error:
        load_config(**settings)
    assert next(iter(settings)) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_yaml_file(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_CONFIG", "/nowhere/at.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config()


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        load_config().tenant = "other"


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [b\n", "just text"])
def test_a_yaml_file_that_is_no_mapping(monkeypatch, tmp_path, text):
    file = tmp_path / "kvmosaic.yaml"
    file.write_text(text)
    monkeypatch.setenv("KVMOSAIC_CONFIG", str(file))
    with pytest.raises(ConfigError) as error:
        load_config()
    assert "\n" not in str(error.value)


def test_urls_of_remote_tiers():
    assert RemoteUrl.parse("valkey://host") == ("valkey", "host", 6379, 0, 0, None, False)
    assert RemoteUrl.parse("redis://me@10.0.0.1:1234/7") == ("valkey", "10.0.0.1", 1234, 7, 0, "me", False)
    assert RemoteUrl.parse("valkeys://[::1]:99") == ("valkey", "::1", 99, 0, 0, None, True)
    assert RemoteUrl.parse("mooncake://host?metrics_port=5") == ("mooncake", "host", 50051, 0, 5, None, False)
    assert load_config(remote="mooncake://host:1").remote == "mooncake://host:1"


def test_a_password_in_a_url_is_not_repeated():
    with pytest.raises(ConfigError, match="KVMOSAIC_REMOTE_PASSWORD") as error:
        load_config(remote="valkey://user:secret@host")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("variable", ["KVMOSAIC_TENNANT", "KVMOSAIC_HOSTMEMORY", "KVMOSAIC_PREFIX_BLOCK"])
def test_a_misspelt_variable_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable}: there is no such setting; did you mean KVMOSAIC_[A-Z_]+"):
        load_config()


@pytest.mark.parametrize("name", ["REMOTE_PASSWORD", "MODELS_DIR", "PROFILES_DIR", "REQUIRE_SERVERS", "VERSION"])
def test_other_variables_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(f"KVMOSAIC_{name}", "1")
    load_config()
