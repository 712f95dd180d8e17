"""Many requests at once in a small engine: small steps, few blocks, preemptions, aborts."""

import random

import pytest

from tests.engines.vllm.helpers import (
    DOCUMENTS,
    answer,
    greedy,
    is_idle,
    plain,
    prompt,
    same,
    start,
)
from tests.engines.vllm.processes import EngineApart

pytestmark = pytest.mark.engine

BLOCKS = 26
"""Number of blocks of 32 tokens. Four of the requests below do not fit together."""
LENGTH = 80
"""Number of tokens that every request generates."""


@pytest.fixture(scope="module")
def cramped(tiny_text):
    little = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    return start(tiny_text, miss_policy="fill-first", max_model_len=512, **little)


def preemptions(llm):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def run_together(llm, requests, aborted):
    """Add all requests, abort some while they run, and return the finished outputs by request id."""
    engine = llm.llm_engine
    for name, (text, params) in requests.items():
        engine.add_request(name, text, greedy(LENGTH, logprobs=1, params=params))
    outputs, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps in aborted:
            engine.abort_request([aborted[steps]])
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return outputs


def test_every_answer_equals_its_single_request_answer(cramped):
    requests = {}
    for number in range(8):
        documents = random.sample(DOCUMENTS, random.randint(2, 4))
        params = {"recompute_ratio": 1.0} if number == 6 else {}
        text = (
            prompt(f"System prompt number {number}.", documents) if number % 4 else f"A plain question, {number}: is"
        )
        requests[f"first-{number}"] = (text, params)
    alone = {name: run_together(cramped, {name: request}, {})[name] for name, request in requests.items()}
    before = preemptions(cramped)
    for turn in range(2):
        together = {f"{turn}-{name}": request for name, request in requests.items()}
        names = list(together)
        aborted = {2: names[1], 25: names[5]}
        outputs = run_together(cramped, together, aborted)
        assert set(outputs) >= set(names) - set(aborted.values())
        for name in set(names) - set(aborted.values()):
            same(outputs[name], alone[name.removeprefix(f"{turn}-")])
    assert preemptions(cramped) > before, "the engine has too much room for this test"
    assert cramped.get_stats()["pinned"] == 0
    assert is_idle(cramped), "something outlived its request"


def test_a_chunk_larger_than_a_step(cramped):
    document = " ".join(DOCUMENTS)
    text = prompt("You are helpful.", [document, DOCUMENTS[0]])
    [theirs] = plain(cramped, [text])
    [exact] = answer(cramped, [text], recompute_ratio=1.0)
    same(exact, theirs)
    first, second = (answer(cramped, [prompt(system, [document])])[0] for system in ("One.", "One."))
    same(second, first)


def test_a_prompt_beyond_the_models_length_is_refused_and_the_engine_goes_on(cramped):
    with pytest.raises(Exception, match="maximum context length is 512"):
        answer(cramped, [prompt("You are helpful.", DOCUMENTS * 20)])
    text = prompt("Still there?", DOCUMENTS)
    same(answer(cramped, [text], recompute_ratio=1.0)[0], plain(cramped, [text])[0])


def test_plain_requests_get_what_a_fresh_engine_gives(cramped, tiny_text):
    """After all this, and with prefix caching on, the tokens are those of an engine without a chunk cache."""
    texts = [prompt("You are helpful.", DOCUMENTS[:3]), "A plain question, 4: is", prompt("Be brief.", DOCUMENTS[1:])]
    for text in texts:
        answer(cramped, [text])
    ours = [plain(cramped, [text])[0] for text in texts]
    with EngineApart(tiny_text, with_cache=False, max_model_len=512) as fresh:
        for text, mine in zip(texts, ours, strict=True):
            [theirs] = fresh.call(answer, [text])
            same(mine, theirs)
