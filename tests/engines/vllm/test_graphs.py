"""Small passes go through vLLM's CUDA graphs, and compute what they compute without."""

import random
from contextlib import contextmanager

import pytest
import torch
from vllm import SamplingParams

from kvmosaic.engines.vllm import sparse
from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import same
from tests.engines.vllm.tiny import write_tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only GPUs have CUDA graphs")

SYSTEM_TOKENS = 2 * SMALL["block_size"]
"""Whole blocks: no part of it is stored, all of it is computed whenever vLLM does not have it."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")
    settings = SMALL | {"enforce_eager": False, "skip_tokenizer_init": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # whose graphs we know how to feed
        yield LLM(model, enable_chunk_cache=True, miss_policy="fill-first", **settings)


def ask(llm, ids, **params):
    llm.reset_prefix_cache(reset_connector=True)  # so chunks are filled, and tokens chosen, each time
    extra = {"kv_transfer_params": params}
    sampling = SamplingParams(
        max_tokens=4, temperature=0, logprobs=1, ignore_eos=True, detokenize=False, extra_args=extra
    )
    return llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.4])
def test_small_passes_go_through_graphs(llm, ratio, monkeypatch):
    sizes = []
    graph_size, graph_inputs = sparse.graph_size, sparse.graph_inputs

    def noted(runner, tokens):
        sizes.append(graph_size(runner, tokens))
        return sizes[-1]

    @contextmanager
    def other_tokens(runner, tokens, positions, count):
        with graph_inputs(runner, tokens + 1, positions, count) as inputs:
            yield inputs

    documents = [[random.randrange(10, 500) for _ in range(90)] for _ in range(4)]
    for _ in range(3):
        ids, boundaries = [], []
        system, question = ([random.randrange(10, 500) for _ in range(length)] for length in (SYSTEM_TOKENS, 9))
        for part in (system, *random.sample(documents, 4), question):
            boundaries.append((len(ids), len(ids) + len(part)))
            ids += part
        params = {"boundaries": boundaries, "recompute_ratio": ratio, "policy": "composite"}
        with monkeypatch.context() as patch:
            patch.setattr(sparse, "graph_size", lambda runner, tokens: None)
            plain = ask(llm, ids, **params)
            patch.setattr(sparse, "graph_size", noted)
            same(ask(llm, ids, **params), plain)
            patch.setattr(sparse, "graph_inputs", other_tokens)
            with pytest.raises(AssertionError):  # or nobody would notice
                same(ask(llm, ids, **params), plain)
    assert sizes
    assert None not in sizes
