"""Draft models with KV: they only propose tokens, so answers are those without them."""

import pytest
import torch
import vllm

from tests.engines.vllm.helpers import (
    ask,
    draw,
    forget,
    join,
    plain_answer,
    report,
    same,
    start,
    statuses,
    store,
    worker_side,
)
from tests.engines.vllm.tiny import write_tiny_eagle, write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        vllm.__version__.startswith("0.23.") and not torch.cuda.is_available(),
        reason="vLLM 0.23 itself cannot sample after drafts on CPUs",
    ),
]

LENGTHS = (21, 33, 48, 64)
SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "prefix_blocks": True}


@pytest.fixture(scope="module", params=["draft_model", "eagle"])
def llm(request, tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "model"
    is_eagle = request.param == "eagle"
    model = write_tiny_eagle(folder, tiny_llama) if is_eagle else write_tiny_llama(folder, num_hidden_layers=2)
    draft = {"method": request.param, "model": model, "num_speculative_tokens": 2}
    return start(tiny_llama, speculative_config=draft, **SETTINGS)


def test_exact_prefixes_are_answered_as_before(llm):
    conversation = draw(700)
    [first] = ask(llm, conversation, max_tokens=20)
    forget(llm)
    [again] = ask(llm, conversation, max_tokens=20)
    assert again.num_cached_tokens >= 256
    same(again, first)


def test_reused_prompts_are_answered_as_without_drafts(llm, tiny_llama):
    """This is the last test, because it starts another engine, without drafts."""
    documents = [draw(length) for length in LENGTHS]
    prompts = [join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])]
    answers = []
    for ids, boundaries in prompts:
        [output] = ask(llm, ids, boundaries=boundaries, report=True)
        answers.append(output)
    assert statuses(answers[1]) == ["cached"] * len(LENGTHS)
    assert report(answers[1])["reused_tokens"] == sum(LENGTHS)
    assert {info.key.num_tokens for info in store().scan()} >= set(LENGTHS)
    exact = []
    for ids, boundaries in prompts:
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
        same(output, plain_answer(llm, ids))
        exact.append(output)
    layers = len(worker_side().forward.kv)
    without = start(tiny_llama, **SETTINGS)
    assert layers == len(worker_side().forward.kv) == 3
    for (ids, boundaries), ours, all_of_it in zip(prompts, answers, exact, strict=True):
        [theirs] = ask(without, ids, boundaries=boundaries)
        same(ours, theirs)
        same(all_of_it, plain_answer(without, ids))
