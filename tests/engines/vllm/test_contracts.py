"""Contracts that an untested release of vLLM has broken are named, and vLLM then starts without the chunk cache."""

import sys
from dataclasses import dataclass
from inspect import Parameter, Signature

import pytest
import vllm
import vllm.v1.core.sched.output as output
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool

from kvmosaic.engines.vllm.arguments import can_be_used
from kvmosaic.engines.vllm.compat import contracts
from kvmosaic.engines.vllm.compat.contracts import broken_contracts
from tests.engines.vllm.helpers import draw, greedy, start


def test_this_release_breaks_nothing():
    assert broken_contracts() == []


def test_a_name_that_was_removed(monkeypatch):
    monkeypatch.delattr("vllm.v1.worker.gpu.attn_utils.build_attn_metadata")
    monkeypatch.delitem(sys.modules, f"{contracts.PACKAGE}.metadata", raising=False)
    [line] = broken_contracts()
    assert line.startswith("metadata: cannot import name 'build_attn_metadata'")


def test_a_method_of_the_pool_that_was_removed(monkeypatch):
    monkeypatch.delattr(BlockPool, "free_blocks")
    assert broken_contracts() == ["BlockPool has no free_blocks"]


def test_a_field_of_a_step_that_was_renamed(monkeypatch):
    @dataclass
    class CachedRequestData:
        req_ids: list
        resumed_req_ids: set
        new_blocks: list
        num_computed_tokens: list

    monkeypatch.setattr(output, "CachedRequestData", CachedRequestData)
    assert broken_contracts() == ["CachedRequestData has no new_block_ids"]


def test_an_argument_that_was_renamed(monkeypatch):
    def build_attn_metadata(**arguments):
        return {}

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in contracts.METADATA_ARGUMENTS - {"positions"}]
    build_attn_metadata.__signature__ = Signature(parameters)
    monkeypatch.setattr("vllm.v1.worker.gpu.attn_utils.build_attn_metadata", build_attn_metadata)
    assert broken_contracts() == ["build_attn_metadata takes no positions"]


def test_methods_that_are_called_in_another_way(monkeypatch):
    def take_events(self, since):
        return []

    monkeypatch.setattr(KVConnectorBase_V1, "take_events", take_events)
    monkeypatch.delattr(KVConnectorBase_V1, "on_new_request")
    assert broken_contracts() == [
        "KVConnectorBase_V1 has no on_new_request",
        "KVConnectorBase_V1.take_events is called with other arguments",
    ]


def test_an_untested_release_is_used_if_nothing_is_broken(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="kvmosaic")  # a library beside vLLM 0.29 sets the root logger to ERROR
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert can_be_used()
    assert "vLLM 0.99.0 was never tried" in caplog.text


@pytest.mark.engine
def test_an_untested_release_that_broke_something_serves_plainly(tiny_llama, monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delattr(BlockPool, "get_num_free_blocks")
    assert not can_be_used()
    assert "BlockPool has no get_num_free_blocks" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("kvmosaic.engines.vllm.llm.can_be_used", lambda: False)
    llm = start(tiny_llama, skip_tokenizer_init=True)
    assert not llm.chunk_cache_config.enable_chunk_cache
    assert llm.llm_engine.vllm_config.kv_transfer_config is None
    [answer] = llm.generate({"prompt_token_ids": draw(20)}, greedy(3), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3
