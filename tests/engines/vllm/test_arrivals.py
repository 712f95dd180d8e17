"""Entries from host memory that arrive late: everything that needs them waits, on the GPU."""

import random

import pytest
import torch

from kvmosaic.engines.vllm.forward.layer_arrivals import LayerArrivals
from tests.engines.vllm.helpers import draw, greedy, join, same, start

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only GPUs have streams beside the engine's"),
]

LATE = 20_000_000
"""Delay of each group of layers, in cycles of the GPU's clock: about 10 ms."""


@pytest.fixture(scope="module", params=["eager", "compiled"])
def llm(tiny_llama, request):
    settings = {"dtype": "bfloat16", "enforce_eager": request.param == "eager", "skip_tokenizer_init": True}
    return start(tiny_llama, miss_policy="fill-first", chunk_cache_gpu_memory_fraction=0.0, **settings)


def late(follow):
    def follow_late(self, launches):
        def slow():
            while True:
                torch.cuda._sleep(LATE)
                layers = next(launches, None)
                if layers is None:
                    return
                yield layers

        return follow(self, slow())

    return follow_late


def ask(llm, ids, **params):
    llm.reset_prefix_cache()
    sampling = greedy(4, logprobs=1, detokenize=False, params=params)
    return llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.4])
def test_late_entries_are_waited_for(llm, ratio, monkeypatch):
    documents = [draw(90) for _ in range(6)]
    for _ in range(3):
        ids, boundaries = join([[5] * 20, *random.sample(documents, 6), draw(9)])
        params = {"boundaries": boundaries, "recompute_ratio": ratio, "policy": "composite"}
        ask(llm, ids, **params)  # fills missing chunks, and chooses
        in_time = ask(llm, ids, **params)
        with monkeypatch.context() as patch:
            patch.setattr(LayerArrivals, "follow", late(LayerArrivals.follow))
            same(ask(llm, ids, **params), in_time)
            patch.setattr(LayerArrivals, "wait", lambda self, layer: None)
            with pytest.raises(AssertionError):  # otherwise a mistake would not show
                same(ask(llm, ids, **params), in_time)
        torch.cuda.synchronize()
