"""Passes go through vLLM's CUDA graphs, with the same results as without graphs."""

import random
from contextlib import contextmanager

import pytest
import torch

from kvmosaic.engines.vllm.compat.graphs import LARGER_SIZES
from kvmosaic.engines.vllm.forward import sparse
from tests.engines.vllm.helpers import SMALL, draw, greedy, join, same, start

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only GPUs have CUDA graphs"),
]

SYSTEM_TOKENS = 2 * SMALL["block_size"]
"""Length of the system prompt: whole blocks, so no part of it is stored, and vLLM computes it whenever its cache
lacks it."""


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # only its graphs can be fed
        yield start(tiny_llama, miss_policy="fill-first", enforce_eager=False, skip_tokenizer_init=True)


def ask(llm, ids, **params):
    llm.reset_prefix_cache(reset_connector=True)  # so chunks are filled, and tokens chosen, each time
    sampling = greedy(4, logprobs=1, detokenize=False, params=params)
    return llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]


@pytest.mark.parametrize(("length", "ratio"), [(90, 0.0), (90, 0.1), (90, 0.4), (400, 0.5)])
def test_passes_go_through_graphs(llm, length, ratio, monkeypatch):
    """By default, vLLM itself has none of 800 tokens."""
    sizes = []
    graph_size, graph_inputs = sparse.graph_size, sparse.graph_inputs

    def noted(runner, tokens):
        sizes.append(graph_size(runner, tokens))
        return sizes[-1]

    @contextmanager
    def other_tokens(runner, tokens, positions, count):
        with graph_inputs(runner, tokens + 1, positions, count) as inputs:
            yield inputs

    documents = [draw(length) for _ in range(4)]
    for _ in range(3):
        ids, boundaries = join([draw(SYSTEM_TOKENS), *random.sample(documents, 4), draw(9)])
        params = {"boundaries": boundaries, "recompute_ratio": ratio, "policy": "composite"}
        with monkeypatch.context() as patch:
            patch.setattr(sparse, "graph_size", lambda runner, tokens: None)
            plain = ask(llm, ids, **params)
            patch.setattr(sparse, "graph_size", noted)
            same(ask(llm, ids, **params), plain)
            patch.setattr(sparse, "graph_inputs", other_tokens)
            with pytest.raises(AssertionError):  # otherwise a mistake would not show
                same(ask(llm, ids, **params), plain)
    assert sizes
    assert None not in sizes
    assert any(size in LARGER_SIZES for size in sizes) is (length == 400)
