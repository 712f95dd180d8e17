"""All steps of a request with a stand-in for vllm-ascend on a CPU: its own layers, metadata, context and layout."""

import importlib.util
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.blend import policy_named
from kvmosaic.core.window import WHOLE
from kvmosaic.engines.vllm import worker
from kvmosaic.engines.vllm.compat.layers import PairLayer
from kvmosaic.engines.vllm.forward.ascend_metadata import AscendMetadataBuilder
from kvmosaic.engines.vllm.paged.by_backend import BackendBlocks
from kvmosaic.hf import LLM as HFEngine
from kvmosaic.kernels.paged import Move, PagedCaches, scatter_reference
from tests.engines.vllm.ascend.test_layout import as_one
from tests.engines.vllm.helpers import (
    OURS,
    PART,
    ask,
    chosen_last,
    close,
    draw,
    fill_alone,
    forget,
    join,
    plain_answer,
    report,
    same,
    start,
    statuses,
    store,
    stored_entry,
    worker_side,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("standin")]

LENGTHS = (21, 33, 48, 64, 150)


@pytest.fixture(scope="module")
def llm(standin, tiny_llama):
    return start(
        tiny_llama,
        miss_policy="fill-first",
        skip_tokenizer_init=True,
        block_size=128,
        num_gpu_blocks_override=64,
        prefix_blocks=True,
    )


@pytest.fixture(scope="module")
def reference(tiny_llama):
    """The embedded engine, which defines the results of reuse."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return HFEngine(
        model, None, enable_chunk_cache=True, miss_policy="fill-first", **OURS | {"chunk_separator": None}
    )


def random_prompt():
    """A system prompt, documents and a question, as tokens; and its boundaries."""
    return join([draw(9), *map(draw, random.sample(LENGTHS, 4)), draw(7)])


def test_the_variants_for_npus_are_used_and_the_self_test_lets_them_pass(llm):
    from vllm_ascend.ascend_forward_context import entered

    side = worker_side()
    assert side.off_reason is None
    assert all(type(layer) is PairLayer for layer in side.forward.kv.layers)
    assert isinstance(side.forward._metadata, AscendMetadataBuilder)
    assert isinstance(side.paged, BackendBlocks)
    assert side.paged.can_read
    assert side.forward.kv.pairs[0][0].shape[1:] == (128, 4, 32)
    entered.clear()
    fill_alone(draw(9), draw(40))
    assert entered == [49]


def test_entries_are_those_of_the_embedded_engine(llm, reference):
    ids, boundaries = random_prompt()
    ask(llm, ids, boundaries=boundaries)
    prompt = reference.parser.parse(ids, boundaries)
    context = reference.chunk_cache.context_of(prompt)
    chunks = [prompt.tokens_of(span) for span in prompt.chunks]
    ours = {entry.tokens: entry for info in store().scan() if (entry := stored_entry(info.key)) is not None}
    for chunk, theirs in zip(chunks, reference.chunk_cache.find_or_fill(chunks, context, len(ids)), strict=True):
        for layer in range(theirs.entry.format.layers):
            for mine, yours in zip(ours[chunk].layer(layer), theirs.entry.layer(layer), strict=True):
                torch.testing.assert_close(mine, yours, atol=1e-4, rtol=1e-4)


def test_ratio_one_is_plain_vllm(llm):
    for policy in ("composite", "random"):
        ids, boundaries = random_prompt()
        [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, policy=policy)
        same(ours, plain_answer(llm, ids))


@pytest.mark.parametrize("policy", ["none", "random(seed=3)", "kv-deviation(layers=1)", "composite(asking=1)"])
def test_both_engines_choose_the_same_tokens_and_give_the_same_logits(llm, reference, policy):
    ids, boundaries = random_prompt()
    ratio = 0.0 if policy == "none" else 0.4
    with reference.engine.session():
        expected = reference.assemble(reference.parser.parse(ids, boundaries), ratio, 0, policy_named(policy))
    [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=ratio, policy=policy, report=True)
    if ratio:
        assert chosen_last() == expected.recomputed
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


def test_documents_are_reused_in_another_order_under_another_system_prompt(llm):
    documents = [draw(length) for length in LENGTHS]
    ids, boundaries = join([draw(9), *documents, draw(7)])
    ask(llm, ids, boundaries=boundaries)
    ids, boundaries = join([draw(30), *documents[::-1], draw(7)])
    [output] = ask(llm, ids, boundaries=boundaries, report=True)
    assert statuses(output) == ["cached"] * len(LENGTHS)
    assert report(output)["reused_tokens"] == sum(LENGTHS)


def test_entries_are_moved_as_the_kernels_reference_moves_them(llm):
    """Entries cross the borders of blocks, and some positions are not written."""
    document = draw(150)
    ids, boundaries = join([draw(9), document, draw(7)])
    ask(llm, ids, boundaries=boundaries)
    side = worker_side()
    found = (stored_entry(info.key) for info in store().scan())
    entry = next(each for each in found if each is not None and each.tokens == tuple(document))
    blocks, at, first = [[5, 3, 9]], random.randrange(60, 200), random.randrange(100, 150)
    pairs = side.forward.kv.pairs
    for cache in (cache for pair in pairs for cache in pair):
        cache.normal_()
    before = as_one(pairs)
    tables = [layer.table.tensor for layer in side.rotary]
    expected = PagedCaches(before.layers, before.k_dim, tables, side.rotary[0].columns)
    move = Move(entry.data, len(entry.tokens), entry.first_position, at)
    scatter_reference([move], expected, blocks[0], first, WHOLE)
    side.paged.place([(entry, at)], blocks, first)
    for mine, theirs in zip(as_one(pairs).layers, expected.layers, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert llm.reset_prefix_cache()  # its blocks were overwritten


def test_exact_prefixes_are_saved_and_loaded(llm):
    tokens = draw(2 * PART + 40)
    [before] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 2 * PART
    close(again, before)


def test_the_worker_is_one_over_the_plugins(monkeypatch, standin):
    """The class is made again, as on a machine where vLLM runs on NPUs."""
    from vllm.platforms import current_platform
    from vllm_ascend.worker.worker import NPUWorker

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_type", "npu")
    spec = importlib.util.spec_from_file_location("worker_on_npus", worker.__file__)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.ChunkWorker.__mro__[1] is NPUWorker
