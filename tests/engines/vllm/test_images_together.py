"""Requests with images beside others, in an engine with little room: small steps, few blocks, preemptions."""

import random

import pytest
import torch

from tests.engines.vllm.helpers import draw, greedy, is_idle, measure_nothing, report, same, set_miss_policy, start
from tests.engines.vllm.vision import SETTINGS, boundaries, forget, note_encoded, picture, plain, prompt, write

pytestmark = pytest.mark.engine

FAMILY = "paddle"
"""A model with M-RoPE: its positions are the hardest to get right in a batch."""
LENGTH = 60
"""Tokens every request generates."""


@pytest.fixture(scope="module")
def cramped(tmp_path_factory):
    """Blocks of 32 tokens; about four of the requests below fit together, and an image with its text into no step."""
    folder = write(FAMILY, tmp_path_factory.mktemp("models") / FAMILY)
    little = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 64, "max_num_seqs": 6, "max_model_len": 512}
    return start(folder, **SETTINGS | little)


@pytest.fixture
def llm(cramped, monkeypatch):
    """With nothing stored, and nothing in vLLM's own caches."""
    forget(cramped, stored=True)
    measure_nothing(monkeypatch)
    return cramped


def preemptions(llm):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def add(llm, name, parts, chunks=(), **params):
    given, places = prompt(FAMILY, *parts)
    if chunks:
        params["boundaries"] = boundaries(places, chunks)
    sampling = greedy(LENGTH, logprobs=1, detokenize=False, params={"report": True, **params})
    llm.llm_engine.add_request(name, given, sampling)


def finish(llm, then=None):
    """The outputs of all requests, by their names; ``then`` is called after each step with its number."""
    outputs, steps = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
        steps += 1
        if then is not None:
            then(steps)
    return outputs


def test_every_answer_equals_its_single_request_answer(llm):
    """Text alone, images alone, both, the same image twice, two images; with chunks and plain; preempted or not."""
    one, two, document = picture(), picture(), draw(60)
    requests = {
        "text": ([draw(30), document, draw(20)], (1,), {}),
        "plain text": ([draw(70)], (), {"chunk_cache": False}),
        "image": ([draw(40), one, draw(20)], (), {}),
        "plain image": ([draw(40), one, draw(20)], (), {"chunk_cache": False}),
        "both": ([draw(20), two, document, draw(20)], (2,), {}),
        "twice": ([draw(25), one, draw(5), one, draw(20)], (), {"recompute_ratio": 0.0}),
        "two": ([draw(15), document, one, two, draw(20)], (1,), {"recompute_ratio": 1.0}),
        "in the question": ([draw(15), document, draw(20), two, draw(10)], (1,), {}),
    }
    alone = {}
    for name, (parts, chunks, params) in requests.items():
        for number in range(2):  # the first time fills; numbers of the second are those of a reused entry
            add(llm, f"{name} {number}", parts, chunks, **params)
            outputs = finish(llm)
            forget(llm)
        alone[name] = outputs[f"{name} 1"]
    before = preemptions(llm)
    for turn in range(2):
        names = list(requests)
        random.shuffle(names)
        for name in names:
            parts, chunks, params = requests[name]
            add(llm, f"{name} of {turn}", parts, chunks, **params)
        outputs = finish(llm)
        for name in names:
            same(outputs[f"{name} of {turn}"], alone[name])
    assert preemptions(llm) > before, "the engine has too much room for this test"
    assert llm.get_stats()["pinned"] == 0
    assert is_idle(llm), "something outlived its request"


def test_a_chunk_of_text_and_images_that_is_larger_than_a_step(llm, monkeypatch):
    """It is filled in several steps, and encoded once."""
    set_miss_policy(monkeypatch, llm, "background")
    parts = [draw(20), draw(50), picture(), draw(50), draw(20)]
    given, places = prompt(FAMILY, *parts)
    chunk = [(0, 20), (20, places[3][1]), places[4]]

    def answers(first, **params):
        sampling = greedy(4, logprobs=1, detokenize=False, params={"boundaries": chunk, "report": True, **params})
        given["prompt_token_ids"][:20] = first
        [output] = llm.generate([given], sampling, use_tqdm=False)
        forget(llm)
        return output

    encoded = note_encoded(monkeypatch)
    assert report(answers(draw(20)))["mode"] == "plain"
    assert encoded == [1]
    add(llm, "other", [draw(40)], chunk_cache=False)
    finish(llm)
    assert encoded == [1, 1]
    other = draw(20)
    found = answers(other, recompute_ratio=0.0)
    assert report(found)["mode"] == "reuse"
    assert encoded == [1, 1]
    forget(llm, stored=True)
    set_miss_policy(monkeypatch, llm, "fill-first")
    same(found, answers(other, recompute_ratio=0.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with steps in flight vLLM does not reset its cache")
@pytest.mark.parametrize("miss_policy", ["background", "fill-first"])
def test_a_preempted_request_whose_images_are_no_longer_stored(llm, monkeypatch, miss_policy):
    """What was brought for it is computed again, and its images are encoded again."""
    parts = [draw(30), picture(), draw(10), picture(), draw(20)]
    add(llm, "first", parts)
    finish(llm)
    forget(llm)
    theirs = plain(llm, FAMILY, *parts)
    set_miss_policy(monkeypatch, llm, miss_policy)

    def preempt(steps):
        if steps == 5:
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            llm.llm_engine.reset_encoder_cache()

    before = preemptions(llm)
    add(llm, "again", parts, recompute_ratio=1.0)
    output = finish(llm, preempt)["again"]
    assert preemptions(llm) == before + 1
    assert output.outputs[0].token_ids[:8] == theirs.outputs[0].token_ids
