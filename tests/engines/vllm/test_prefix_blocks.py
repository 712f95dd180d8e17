"""Exact prefix blocks: the KV of ordinary prompts and answers through the store, bit for bit."""

import json
import random
import subprocess
import sys

import pytest
from vllm import SamplingParams

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import DOCUMENTS, prompt
from tests.engines.vllm.tiny import write_tiny_llama

PART = 256


def start(**settings):
    from kvmosaic.vllm import LLM

    return LLM("smollm2-135m", enable_chunk_cache=True, prefix_blocks=True, **SMALL | settings)


WRITER = """
import json, sys
from tests.engines.vllm.test_prefix_blocks import ask, draw, forget, start
llm = start(disk_path=sys.argv[1])
tokens = draw(808)
[output] = ask(llm, tokens)
forget(llm)
llm.llm_engine.engine_core.shutdown()
print(json.dumps({"tokens": tokens, "answer": list(output.outputs[0].token_ids)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def written(folder):
    """What another process stored in the folder: a prompt's tokens and its answer."""
    run = subprocess.run([sys.executable, "-c", WRITER, folder], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def llm(folder, written):
    return start(disk_path=folder)


def ask(llm, *prompts, max_tokens=8, salt=None, **params):
    """Answers to prompts that are sent together."""
    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=3, extra_args=extra)
    given = [{"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {}) for tokens in prompts]
    return llm.generate(given, sampling, use_tqdm=False)


def exact(output):
    """What the model said, and how likely it found the likeliest tokens, to the last bit."""
    answer = output.outputs[0]
    return answer.token_ids, [{token: each.logprob for token, each in step.items()} for step in answer.logprobs]


def draw(count):
    return [random.randrange(10, 40000) for _ in range(count)]


def forget(llm):
    """Have the last request's KV stored, then empty vLLM's own prefix cache, and nothing else."""
    ask(llm, draw(5))
    assert llm.reset_prefix_cache()


def test_a_prompt_that_vllm_forgot_comes_back_bit_for_bit(llm):
    tokens = draw(3 * PART + 40)
    [first] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    assert exact(again) == exact(first)
    forget(llm)
    [other_end] = ask(llm, tokens[: 2 * PART + 5] + draw(30))
    assert other_end.num_cached_tokens == 2 * PART
    forget(llm)
    [moved] = ask(llm, draw(5) + tokens)  # at other positions, and after other tokens
    assert moved.num_cached_tokens == 0


def test_at_least_one_token_is_computed(llm):
    tokens = draw(2 * PART)
    [first] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == PART
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_answers_are_stored_as_they_are_made(llm):
    tokens = draw(PART - 20)
    [first] = ask(llm, tokens, max_tokens=PART + 60)
    conversation = [*tokens, *first.outputs[0].token_ids, *draw(30)]
    forget(llm)
    [again] = ask(llm, conversation)
    assert again.num_cached_tokens == 2 * PART
    [plain] = ask(llm, conversation, salt="kept apart")
    assert plain.num_cached_tokens == 0
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids


def test_vllms_own_prefix_cache_comes_first(llm):
    tokens = draw(3 * PART + 40)
    ask(llm, tokens)
    forget(llm)
    ask(llm, tokens[: PART + 70])  # brings one part back and computes two blocks behind it
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    [plain] = ask(llm, tokens, salt="kept apart")
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids


def test_approximate_kv_is_never_stored_as_exact(llm):
    tokens = llm.get_tokenizer().encode(prompt("You are helpful. " * 4, DOCUMENTS * 4))
    assert len(tokens) > PART
    for _ in range(2):  # filled behind the first answer, reused for the second
        ask(llm, tokens, recompute_ratio=0.15)
    [reused] = ask(llm, tokens, recompute_ratio=0.15, report=True)
    assert reused.kv_transfer_params["mode"] == "reuse"
    forget(llm)
    [plain] = ask(llm, tokens, chunk_cache=False)
    assert plain.num_cached_tokens == 0


def test_who_asks_to_be_kept_apart_is(llm):
    tokens = draw(2 * PART + 9)
    ask(llm, tokens, salt="mine")
    forget(llm)
    for salt in (None, "yours", "mine"):
        assert ask(llm, tokens, salt=salt)[0].num_cached_tokens == 0
        assert llm.reset_prefix_cache()


def test_requests_that_share_and_differ_at_random_places(llm):
    trunk = draw(4 * PART)
    for _ in range(4):
        prompts = [
            trunk[: random.randrange(1, len(trunk))] + draw(random.randrange(1, 80))
            for _ in range(random.randrange(1, 5))
        ]
        together = ask(llm, *prompts)
        if random.random() < 0.7:
            forget(llm)
        for tokens, output in zip(prompts, together, strict=True):
            [plain] = ask(llm, tokens, salt="kept apart")
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_another_engine_serves_what_one_stored(llm, written):
    [again] = ask(llm, written["tokens"])
    assert again.num_cached_tokens == 3 * PART
    assert list(again.outputs[0].token_ids) == written["answer"]


def test_blocks_that_the_next_request_writes_over_at_once(tmp_path):
    """What a finished request leaves is stored before its blocks are somebody else's."""
    from kvmosaic.vllm import LLM

    model = write_tiny_llama(tmp_path / "llama")
    blocks = PART // SMALL["block_size"] + 3  # for one request, and the block that is never used
    settings = SMALL | {"max_model_len": PART + 64, "num_gpu_blocks_override": blocks, "skip_tokenizer_init": True}
    llm = LLM(model, enable_chunk_cache=True, prefix_blocks=True, **settings)
    prompts = [[random.randrange(10, 500) for _ in range(PART + 20)] for _ in range(3)]
    # One after the other, each in the same blocks, and each over before anything of it was stored.
    first = [ask(llm, tokens, max_tokens=1)[0] for tokens in prompts]
    ask(llm, [5, 6, 7])
    for tokens, before in zip(prompts, first, strict=True):
        [again] = ask(llm, tokens, max_tokens=1)
        assert again.num_cached_tokens == PART
        assert exact(again) == exact(before)
