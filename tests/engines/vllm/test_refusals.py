"""Set-ups that cannot work are refused in one line, before any engine process starts."""

import pytest
import vllm

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.arguments import WORKER, engine_arguments
from kvmosaic.vllm import LLM
from tests.engines.vllm.helpers import SMALL, start

pytestmark = pytest.mark.engine


def test_a_kv_cache_of_another_kind():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8_per_token_head.*\S") as caught:
        LLM("smollm2-135m", enable_chunk_cache=True, kv_cache_dtype="fp8_per_token_head", **SMALL)
    assert "\n" not in str(caught.value)


def test_the_worker_alone_or_beside_another_connector(tiny_llama):
    """``vllm serve`` may be set up like this by hand."""
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    offloading["kv_connector_extra_config"] = {"cpu_bytes_to_use": 2**20}
    ours = engine_arguments(load_config(enable_chunk_cache=True))["kv_transfer_config"]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [ours, offloading]}
    for transfer in (None, offloading, several):
        with pytest.raises(Exception, match=r"worker_cls=ChunkWorker needs the connector ChunkConnector"):
            vllm.LLM(tiny_llama, skip_tokenizer_init=True, worker_cls=WORKER, kv_transfer_config=transfer, **SMALL)


def test_without_the_chunk_cache_nothing_is_refused(tiny_llama):
    llm = LLM(tiny_llama, skip_tokenizer_init=True, **SMALL)
    with pytest.raises(ConfigError, match="enable_chunk_cache=True"):
        llm.get_stats()


def test_rotary_positions_that_cannot_move(tiny_llama, monkeypatch):
    """Keys that do not rotate with their position are noticed by measuring."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def mirrored(self, positions, query, key=None, *rest):
        query, key = original(self, positions, query, key, *rest)
        return query, None if key is None else key * (1 + positions[:, None].to(key.dtype))

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # otherwise later engines of this process would use them
    original = RotaryEmbedding.forward_native
    for name in ("forward_native", "forward_cpu"):
        if hasattr(RotaryEmbedding, name):
            monkeypatch.setattr(RotaryEmbedding, name, mirrored)
    with pytest.raises(Exception, match="do not move with position like rotary ones"):
        start(tiny_llama, skip_tokenizer_init=True)
