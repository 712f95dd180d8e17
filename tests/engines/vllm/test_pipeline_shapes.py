"""Pipeline stages in engines with other settings, models and sizes, one at a time."""

from typing import Any

import pytest
import torch

from tests.engines.vllm.helpers import draw, scheduler_side
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_pipeline_parallel import (
    LAYERS,
    POLICIES,
    SETTINGS,
    ask,
    ask_afresh,
    documents,
    entries,
    off_reason,
    on_ranks,
    share,
)
from tests.engines.vllm.test_tensor_parallel import STEP
from tests.engines.vllm.tiny import write_tiny_gemma, write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("six"), num_hidden_layers=LAYERS)


def holds_back(llm: Any) -> int:
    """Chunks that wait to be filled."""
    return len(scheduler_side(llm)._backlog)


@pytest.mark.long
def test_a_long_chunk_is_filled_while_others_decode(model):
    """vLLM plans empty steps while a request is in another stage. The chunk keeps its blocks during those."""
    long = draw(4 * STEP)
    with EngineApart(model, stages=2, **SETTINGS | {"miss_policy": "background"}) as engine:
        engine.call(ask, [[12] * 9, long, [7, 8, 9]], count=150)
        assert engine.call(holds_back) == 0
        first, second = engine.call(on_ranks, entries)
    assert len(first) == len(second) == 1


@pytest.mark.long
def test_layers_with_a_sliding_window(tmp_path):
    """Stages store such layers whole."""
    model = write_tiny_gemma(tmp_path, 40)
    texts = documents()
    prompts = [[[12] * 9, *texts, [7, 8, 9]], [[13] * 11, *texts[::-1], [7, 8, 9]]]
    settings = SETTINGS | {"window_tails": False}
    said = []
    for stages in (2, 1):
        with EngineApart(model, stages=stages, **settings) as engine:
            said.append([engine.call(ask_afresh, prompt) for prompt in prompts])
            if stages == 2:
                assert engine.call(on_ranks, off_reason) == [None, None]
    assert said[0] == said[1]


@pytest.mark.long
def test_two_stages_of_two_ranks(model):
    texts = documents()
    prompts = [[[12] * 9, *texts, [7, 8, 9]], [[13] * 11, *texts[::-1], draw(20)]]
    said = []
    for ranks, stages in ((2, 2), (1, 1)):
        with EngineApart(model, ranks=ranks, stages=stages, **SETTINGS) as engine:
            said.append([engine.call(ask_afresh, prompts[0])])
            said[-1] += [engine.call(ask_afresh, prompts[1], **params) for params in POLICIES]
            if stages == 2:
                assert engine.call(on_ranks, share) == ["0-1of4L0-2", "2-3of4L0-2", "0-1of4L3-5", "2-3of4L3-5"]
    assert said[0] == said[1]
