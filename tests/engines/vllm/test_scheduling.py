"""Many requests at once in an engine with little room: small steps, few blocks, preemptions, aborts."""

import json
import random
import subprocess
import sys

import pytest
from vllm import SamplingParams

from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import DOCUMENTS, answer, plain, prompt, same

BLOCKS = 26
"""Of 32 tokens each: four of the requests below do not fit together."""
LENGTH = 80
"""Tokens every request generates."""


@pytest.fixture(scope="module")
def cramped():
    return LLM(
        "smollm2-135m",
        enable_chunk_cache=True,
        **SMALL | {"max_model_len": 512},
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=64,
        max_num_seqs=6,
    )


def sampling(**params):
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=1, ignore_eos=True, extra_args=extra)


def preemptions(llm):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def run_together(llm, requests, aborted):
    """Add all requests, abort some on the way, return the finished outputs by request id."""
    engine = llm.llm_engine
    for name, (text, params) in requests.items():
        engine.add_request(name, text, sampling(**params))
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
    core = cramped.llm_engine.engine_core.engine_core
    assert not core.scheduler.connector.scheduler._plans, "a plan outlived its request"


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


FRESH_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
request = json.load(sys.stdin)
llm = LLM(request["model"], **request["options"])
sampling = SamplingParams(max_tokens=10, temperature=0, logprobs=1, ignore_eos=True)
answers = []
for text in request["texts"]:
    [output] = llm.generate([text], sampling, use_tqdm=False)
    steps = [{token: seen.logprob for token, seen in step.items()} for step in output.outputs[0].logprobs]
    answers.append([list(output.outputs[0].token_ids), steps])
print("ANSWERS " + json.dumps(answers))
"""


def test_plain_requests_get_what_a_fresh_engine_gives(cramped, smollm2_folder):
    """After all this, and with prefix caching on: the same tokens as an engine that never heard of chunks."""
    texts = [prompt("You are helpful.", DOCUMENTS[:3]), "A plain question, 4: is", prompt("Be brief.", DOCUMENTS[1:])]
    for text in texts:
        answer(cramped, [text])
    ours = [plain(cramped, [text])[0].outputs[0] for text in texts]
    request = {"model": str(smollm2_folder), "options": SMALL | {"max_model_len": 512}, "texts": texts}
    run = subprocess.run(
        [sys.executable, "-c", FRESH_ENGINE], input=json.dumps(request), capture_output=True, text=True, timeout=400
    )
    [line] = [line for line in run.stdout.splitlines() if line.startswith("ANSWERS ")] or [run.stderr[-3000:]]
    for mine, (tokens, logprobs) in zip(ours, json.loads(line.removeprefix("ANSWERS ")), strict=True):
        assert list(mine.token_ids) == tokens
        for step, theirs in zip(mine.logprobs, logprobs, strict=True):
            for token, logprob in theirs.items():
                if int(token) in step:
                    assert step[int(token)].logprob == pytest.approx(logprob, abs=1e-3)
