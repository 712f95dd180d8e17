"""Settings: keyword, environment, YAML, default; one-line errors."""

import pytest

from kvmosaic.core.config import CHUNK_SOURCES, CLIENT_PARAMETERS, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.limits import shown_id
from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.core.store_key import StoreKey

pytestmark = pytest.mark.usefixtures("default_ratio")


def test_defaults():
    config = load_config()
    assert (config.enable_chunk_cache, config.chunk_separator, config.chunk_hash_algorithm) == (
        False,
        None,
        "xxhash",
    )
    assert config.recompute_ratio == 0.15  # docs/quality.md says why


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
        {"min_chunk_tokens": 0},
        {"client_parameters": "policy,oracle"},
        {"client_parameters": ["all", "policy"]},
        {"client_parameters": 5},
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


@pytest.mark.parametrize("password", ["secret", "sec/ret", "s@secret", "two secret words", "'secret'", "sec:ret#1"])
def test_a_password_in_a_url_is_not_repeated(password):
    with pytest.raises(ConfigError, match=r"remote") as error:
        load_config(remote=f"valkey://user:{password}@host")
    assert "ret" not in str(error.value).replace("remote store", "")


def test_ids_are_shown_as_they_are():
    for name in ("chatcmpl-1", "it's", 'say "it"', "both ' and \""):
        assert shown_id(name) == repr(name)[1:-1]
    assert shown_id("x" * 1000) == "x" * 79 + "…"


@pytest.mark.parametrize("variable", ["KVMOSAIC_TENNANT", "KVMOSAIC_HOSTMEMORY", "KVMOSAIC_STORE_KEYS"])
def test_a_misspelt_variable_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=f"{variable}: there is no such setting; did you mean KVMOSAIC_[A-Z_]+"):
        load_config()


@pytest.mark.parametrize("name", ["REMOTE_PASSWORD", "MODELS_DIR", "PROFILES_DIR", "REQUIRE_SERVERS", "VERSION"])
def test_other_variables_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(f"KVMOSAIC_{name}", "1")
    load_config()


def set_everywhere(monkeypatch, tmp_path, name, value, variable, yaml):
    """A setting from each source in turn."""
    yield load_config(**{name: value})
    with monkeypatch.context() as patch:
        patch.setenv(f"KVMOSAIC_{name.upper()}", variable)
        yield load_config()
    path = tmp_path / "settings.yaml"
    path.write_text(f"{name}: {yaml}\n")
    with monkeypatch.context() as patch:
        patch.setenv("KVMOSAIC_CONFIG", str(path))
        yield load_config()


@pytest.mark.parametrize(("value", "yaml"), [("", '""'), (None, "null")])
def test_the_separator_can_be_switched_off(monkeypatch, tmp_path, value, yaml):
    for config in set_everywhere(monkeypatch, tmp_path, "chunk_separator", value, "", yaml):
        assert config.chunk_separator is None
        # As the settings reach an engine's processes.
        assert load_config(**config.model_dump(mode="json")).chunk_separator is None


@pytest.mark.parametrize(
    ("value", "variable", "yaml", "allowed"),
    [
        ("all", "all", "all", set(CLIENT_PARAMETERS)),
        ("none", "none", "none", set()),
        ([], "", "[]", set()),
        (["policy", "report"], "policy, report", "[policy, report]", {"policy", "report"}),
        ("boundaries", "boundaries", "boundaries", {"boundaries"}),
    ],
)
def test_which_parameters_clients_may_send(monkeypatch, tmp_path, value, variable, yaml, allowed):
    monkeypatch.setenv("KVMOSAIC_CHUNK_SOURCES", "none")
    for config in set_everywhere(monkeypatch, tmp_path, "client_parameters", value, variable, yaml):
        assert config.allowed_parameters == allowed
        assert load_config(**config.model_dump(mode="json")).allowed_parameters == allowed


def test_reports_are_not_allowed_by_default():
    assert load_config().allowed_parameters == set(CLIENT_PARAMETERS) - {"report"}


@pytest.mark.parametrize(
    ("value", "variable", "yaml", "sources"),
    [
        ("all", "all", "all", set(CHUNK_SOURCES)),
        ("none", "", "[]", set()),
        (["parts", "auto"], "parts, auto", "[parts, auto]", {"parts", "auto"}),
    ],
)
def test_what_is_taken_for_documents(monkeypatch, tmp_path, value, variable, yaml, sources):
    for config in set_everywhere(monkeypatch, tmp_path, "chunk_sources", value, variable, yaml):
        assert config.sources == sources
        assert load_config(**config.model_dump(mode="json")).sources == sources


def test_what_the_server_adds_is_allowed():
    assert load_config(client_parameters="none").allowed_parameters == {"documents", "question", "seams"}
    for sources in ("auto", "none"):
        alone = {"client_parameters": "none", "chunk_sources": sources}
        assert load_config(**alone).allowed_parameters == set()
        assert load_config(**alone, chunk_separator="#").allowed_parameters == {"question"}


SECRET = "correct-horse-battery"


def test_a_store_key_is_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("KVMOSAIC_STORE_KEY", SECRET)
    config, key = load_config(), StoreKey.from_environment()
    assert key is not None
    for text in (repr(config), str(config.model_dump()), repr(key), str(vars(config)), key.id, caplog.text):
        assert SECRET not in text
    with pytest.raises(ConfigError, match="KVMOSAIC_STORE_KEY") as error:
        load_config(store_key=SECRET)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("text", ["", "short", "fifteen-bytes-1"])
def test_a_store_key_that_is_too_short_is_refused(monkeypatch, text):
    monkeypatch.setenv("KVMOSAIC_STORE_KEY", text)
    with pytest.raises(ConfigError, match=r"KVMOSAIC_STORE_KEY: .* at least 16") as error:
        load_config()
    assert not text or text not in str(error.value)
