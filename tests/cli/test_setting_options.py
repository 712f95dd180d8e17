"""Settings as options: all of them, with help, types and choices."""

from pathlib import Path

import pytest
import typer

from kvmosaic.cli.main import app
from kvmosaic.cli.setting_options import takes_settings
from kvmosaic.core.config import SECRETS, ChunkCacheConfig, load_config
from kvmosaic.core.setting import all_settings
from tests.cli.command import run_here

pytestmark = pytest.mark.usefixtures("default_ratio")

SERVE = typer.main.get_command(app).commands["serve"]
REFUSED = "chunk_admin_key"
"""Option that only exists to say where its secret has to be set."""
GIVEN = {
    "enable_chunk_cache": ("--enable-chunk-cache", True),
    "chunk_separator": ("--chunk-separator= # # ", " # # "),
    "min_chunk_tokens": ("--min-chunk-tokens=20", 20),
    "chunk_hash_algorithm": ("--chunk-hash-algorithm=sha256", "sha256"),
    "chunk_context": ("--chunk-context=system", "system"),
    "sink_prefix": ("--sink-prefix=bos", "bos"),
    "recompute_ratio": ("--recompute-ratio=0.5", 0.5),
    "policy": ("--policy=none", "none"),
    "miss_policy": ("--miss-policy=never", "never"),
    "prefix_blocks": ("--prefix-blocks", True),
    "chunk_sources": ("--chunk-sources=all", "all"),
    "client_parameters": ("--client-parameters=policy,report", "policy,report"),
    "admin_shows_text": ("--admin-shows-text", True),
    "chunk_page": ("--chunk-page", True),
    "entry_dtype": ("--entry-dtype=int8", "int8"),
    "window_tails": ("--no-window-tails", False),
    "self_test": ("--no-self-test", False),
    "chunk_cache_gpu_memory_fraction": ("--chunk-cache-gpu-memory-fraction=0.3", 0.3),
    "host_memory": ("--host-memory=3GiB", 3 * 2**30),
    "disk_path": ("--disk-path=kv", Path("kv")),
    "disk_space": ("--disk-space=4GiB", 4 * 2**30),
    "tenant_quota": ("--tenant-quota=5MiB", 5 * 2**20),
    "remote": ("--remote=valkey://host:6379/0", "valkey://host:6379/0"),
    "remote_deadline_ms": ("--remote-deadline-ms=70", 70),
    "per_head_storage": ("--per-head-storage", True),
    "remote_layers": ("--remote-layers=8", 8),
    "tenant": ("--tenant=team", "team"),
}
"""An option for each setting, and the value that the setting then has, which is never its default."""


def test_serve_offers_exactly_the_settings():
    options = {parameter.name: parameter for parameter in SERVE.params if parameter.param_type_name == "option"}
    assert set(options) - {REFUSED, "help"} == set(ChunkCacheConfig.model_fields)
    for setting in all_settings():
        option = options[setting.name]
        assert "/".join((*option.opts, *option.secondary_opts)) == setting.flag
        assert option.help
        assert option.default is None, "a default here would hide the environment's value"


def test_every_setting_says_what_it_means():
    for setting in all_settings():
        assert setting.meaning.endswith("."), setting.name
        assert setting.type_name


def test_options_reach_the_settings():
    assert set(GIVEN) == set(ChunkCacheConfig.model_fields)
    loaded = []
    program = typer.Typer()

    @program.command()
    @takes_settings
    def command(**settings):
        loaded.append(load_config(**{name: value for name, value in settings.items() if value is not None}))

    program([option for option, _ in GIVEN.values()], standalone_mode=False)
    program([], standalone_mode=False)
    given, default = loaded
    for name, (_, expected) in GIVEN.items():
        assert getattr(given, name) == expected
        assert getattr(default, name) != expected
    assert not default.model_fields_set


def test_switches_can_turn_off_what_the_environment_turns_on(monkeypatch):
    monkeypatch.setenv("KVMOSAIC_RECOMPUTE_RATIO", "7")
    monkeypatch.setenv("KVMOSAIC_SELF_TEST", "maybe")
    assert "self_test" not in run_here("serve", "m", "--no-self-test").stderr
    assert "self_test" in run_here("serve", "m").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--miss-policy", "sometimes"), "--miss-policy"),
        (("--min-chunk-tokens", "many"), "--min-chunk-tokens"),
        (("--min-chunk-tokens", "0"), "min_chunk_tokens"),
        (("--recompute-ratio", "1.5"), "recompute_ratio"),
        (("--host-memory", "much"), "host_memory"),
        (("--tenant-quota", "-1"), "tenant_quota"),
        (("--remote", "http://host"), "remote"),
        (("--chunk-admin-key", "0123456789abcdef"), SECRETS[-1]),
        (("--chunk-page",), SECRETS[-1]),
        (("--tenant",), "--tenant"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    done = run_here("serve", "m", *options)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert message in line


def test_the_usage_table_has_all_settings_and_their_defaults():
    """The table explains more than the class does, but its names and defaults must be those of the class."""
    lines = (Path(__file__).parents[2] / "docs" / "usage.md").read_text().splitlines()
    start = lines.index("| setting | default | meaning |")
    rows = [line.split(" | ") for line in lines[start + 2 : lines.index("", start)]]
    described = {row[0].strip("| `"): row[1].strip("`–") for row in rows}
    assert described | {"client_parameters": ""} == {
        setting.name: "" if setting.name == "client_parameters" else setting.default for setting in all_settings()
    }
