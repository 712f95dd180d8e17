"""Exact prefix blocks: the KV of ordinary prompts and answers comes back from the store, bit for bit."""

import random
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.vllm.helpers import (
    PART,
    SMALL,
    as_before,
    ask,
    draw,
    forget,
    forget_fast_copies,
    join,
    note_readers,
    report,
    start,
    store,
    stored_entry,
)

pytestmark = pytest.mark.engine

SETTINGS = {"prefix_blocks": True, "miss_policy": "fill-first", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def written(folder, tiny_llama):
    """Data that another engine stored in the folder: a prompt's tokens and its answer."""
    llm = start(tiny_llama, disk_path=folder, **SETTINGS)
    tokens = draw(808)
    [output] = ask(llm, tokens)
    forget(llm)
    return tokens, output.outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(folder, written, tiny_llama):
    return start(tiny_llama, disk_path=folder, **SETTINGS)


def test_a_prompt_that_vllm_forgot_comes_back_bit_for_bit(llm):
    tokens = draw(3 * PART + 40)
    [first] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    as_before(again, first)
    forget(llm)
    [other_end] = ask(llm, tokens[: 2 * PART + 5] + draw(30))
    assert other_end.num_cached_tokens == 2 * PART
    forget(llm)
    [moved] = ask(llm, draw(5) + tokens)  # at other positions, and after other tokens
    assert moved.num_cached_tokens == 0


def test_no_step_reads_the_disk_itself(llm, monkeypatch):
    """Everything is on disk only, and the scheduler does not know it, so it is computed."""
    tokens = draw(2 * PART + 40)
    [first] = ask(llm, tokens)
    forget(llm)
    forget_fast_copies()
    readers = note_readers(monkeypatch)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 2 * PART  # says the scheduler
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert threading.current_thread() not in readers


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
    ask(llm, tokens[: PART + 70])  # loads one part and computes two blocks behind it
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    [plain] = ask(llm, tokens, salt="kept apart")
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids


def test_approximate_kv_is_never_stored_as_exact(llm):
    tokens, boundaries = join([draw(20), *(draw(70) for _ in range(4)), draw(9)])
    params = {"boundaries": boundaries, "recompute_ratio": 0.15}
    assert len(tokens) > PART
    for _ in range(2):  # filled for the first answer, reused for the second
        ask(llm, tokens, **params)
    [reused] = ask(llm, tokens, **params, report=True)
    assert report(reused)["mode"] == "reuse"
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
    tokens, expected = written
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    assert again.outputs[0].token_ids == expected


def stored_kv_error(tokens, model):
    """Distance of the stored KV of a prompt's first part from transformers' in float64, relative to its size."""
    with torch.inference_mode():
        cache = model(torch.tensor([tokens[:PART]])).past_key_values
    [entry] = [
        stored_entry(info.key) for info in store().scan() if stored_entry(info.key).tokens == tuple(tokens[:PART])
    ]
    errors = []
    for index, layer in enumerate(cache.layers):
        for ours, theirs in zip(entry.layer(index), (layer.keys[0], layer.values[0]), strict=True):
            errors.append(float((ours.cpu().double() - theirs).norm() / theirs.norm()))
    return max(errors)


def test_blocks_that_the_next_request_writes_over_at_once(tiny_llama):
    """The KV of a finished request is stored before another request gets its blocks. The KV of another prompt would
    have a relative error of about 1, far more than rounding, even on a GPU in tf32."""
    blocks = PART // SMALL["block_size"] + 3  # enough for one request, and the block that is never used
    llm = start(tiny_llama, max_model_len=PART + 64, num_gpu_blocks_override=blocks, **SETTINGS)
    prompts = [draw(PART + 20) for _ in range(3)]
    # One after the other, each in the same blocks, and each finished before any of it was stored.
    first = [ask(llm, tokens, max_tokens=1)[0] for tokens in prompts]
    ask(llm, [5, 6, 7])
    reference = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    for tokens, before in zip(prompts, first, strict=True):
        assert stored_kv_error(tokens, reference) < (1e-2 if torch.cuda.is_available() else 1e-5)
        [again] = ask(llm, tokens, max_tokens=1)
        assert again.num_cached_tokens == PART
        as_before(again, before)
