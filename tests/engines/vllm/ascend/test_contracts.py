"""The names that the chunk cache uses of vllm-ascend exist in its source and in its stand-in."""

import os
import shutil
from pathlib import Path

import pytest
import vllm

from kvmosaic.engines.vllm.compat.sources import broken_plugin, broken_sources
from tests.engines.vllm.ascend.conftest import STANDIN

VLLM = Path(vllm.__file__).parent
SOURCE = os.environ.get("VLLM_ASCEND_SOURCE")
"""The folder ``vllm_ascend`` of an unpacked source distribution."""


@pytest.mark.skipif(SOURCE is None, reason="VLLM_ASCEND_SOURCE names no unpacked source of vllm-ascend")
def test_the_plugin_has_what_is_used():
    assert broken_sources(VLLM, Path(SOURCE)) == []


def test_so_has_the_stand_in():
    assert broken_sources(VLLM, STANDIN / "vllm_ascend") == []


def test_without_the_plugin_nothing_is_broken():
    assert broken_plugin() == []


def test_what_a_release_changed_is_named(tmp_path):
    folder = shutil.copytree(STANDIN / "vllm_ascend", tmp_path / "vllm_ascend")
    utils, backend = folder / "attention" / "utils.py", folder / "attention" / "attention_v1.py"
    utils.write_text(utils.read_text().replace("attn_state", "state"))
    renamed = backend.read_text().replace(
        "def do_kv_cache_update(self, layer,", "def do_kv_cache_update(self, module,"
    )
    backend.write_text(renamed.replace("class AscendAttentionState", "class State"))
    (folder / "worker" / "worker.py").unlink()
    assert broken_sources(VLLM, folder) == [
        "AscendCommonAttentionMetadata has no attn_state",
        "vllm_ascend/attention/attention_v1.py has no AscendAttentionState",
        "AscendAttentionBackendImpl.do_kv_cache_update has no layer",
        "vllm_ascend/worker/worker.py is missing",
    ]
