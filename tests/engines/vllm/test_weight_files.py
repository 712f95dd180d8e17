"""Weights are identified by their files if it is certain that vLLM loaded those, otherwise by their content in
memory."""

from types import SimpleNamespace

import pytest
from vllm import envs

from kvmosaic.engines.vllm.compat.weights import CHANGING, weight_files
from kvmosaic.engines.vllm.worker import ChunkWorker, PlatformWorker


def config(load_format="auto", download_dir=None, model="owner/name", **more):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision="abc", **more),
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
    )


def files(given):
    return weight_files(given.model_config, given.load_config)


def test_files_in_the_hub_s_cache_or_where_the_user_wants_it():
    assert files(config()) == ("owner/name", "abc", None)
    assert files(config("safetensors", "/data", model_weights="")) == ("owner/name", "abc", "/data")


@pytest.mark.parametrize(
    "format_", ["dummy", "tensorizer", "sharded_state", "runai_streamer", "ipc_cache", "pt", "npcache", "a-plugin"]
)
def test_formats_that_load_something_else(format_):
    assert files(config(format_)) is None


def test_object_storage_and_modelscope(monkeypatch):
    assert files(config(model="/tmp/only-the-config", model_weights="s3://bucket/model")) is None
    # The environment is not used, because vLLM reads it once, perhaps for an earlier engine.
    monkeypatch.setitem(vars(envs), "VLLM_USE_MODELSCOPE", True)
    assert files(config()) is None


def test_one_file_is_what_it_is(tmp_path):
    file = tmp_path / "model.gguf"
    assert files(config("gguf", model=str(file))) is None
    file.write_bytes(b"weights")
    assert files(config("gguf", model=str(file))) == (str(file), "abc", None)


def test_all_that_changes_weights_in_this_release_is_watched():
    there = [name for name in CHANGING if hasattr(PlatformWorker, name)]
    assert {"reload_weights", "update_weights", "wake_up"} <= set(there)
    assert all(getattr(ChunkWorker, name) is not getattr(PlatformWorker, name) for name in there)
