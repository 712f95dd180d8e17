"""Sets of recomputed tokens that shrink from layer to layer: the same in vLLM as in the embedded engine."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.forward_context import get_forward_context

from kvmosaic.blend import policy_named
from kvmosaic.engines.hf import narrowing
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.compat.weights import loaded_model
from kvmosaic.engines.vllm.forward import metadata
from kvmosaic.engines.vllm.forward.narrowing import Narrowing
from kvmosaic.engines.vllm.forward.narrowing_trial import layers_that_narrow
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    OURS,
    SMALL,
    ask,
    block_pool,
    chosen_last,
    draw,
    fail,
    forget_kept,
    greedy,
    has_measured_layers,
    hooked_modules,
    join,
    kept_last,
    limit_runs,
    note_choices,
    note_placed,
    plain_answer,
    reads_blocks,
    same,
    scheduler_side,
    start,
    worker_side,
)
from tests.engines.vllm.tiny import VOCABULARY, write_tiny_llama

pytestmark = pytest.mark.engine

# The first layer's K and V of a token depend on no other token.
POLICY = "kv-deviation(layers=1+2+4)"
SPECS = [
    POLICY,
    "kv-deviation(part=v, layers=1+3, shrink=3)",
    "kv-deviation(layers=1+2+3+4+5+6, shrink=1.3)",
    "kv-deviation(layers=1+5, unit=document)",
    "kv-deviation(layers=1+3, threshold=0.9, shrink=1)",
]
LENGTHS = (21, 33, 48, 64, 70)
STEP = 512
"""Maximum number of tokens in a step of the engine with short steps."""


@pytest.fixture(scope="module")
def llm(tiny_text):
    """Documents are in the store after the first request that has them."""
    return start(tiny_text, miss_policy="fill-first")


@pytest.fixture(scope="module")
def read(llm):
    return reads_blocks()


@pytest.fixture(scope="module")
def reference(tiny_text, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    return HFEngine(model, tokenizer, enable_chunk_cache=True, miss_policy="fill-first", **OURS)


@pytest.fixture
def kept_there(monkeypatch):
    """The tokens that each check of the embedded engine kept, without those that last to the end."""
    kept = []
    written = narrowing.Narrowing.written

    def noting(self, layer, *rest):
        written(self, layer, *rest)
        if layer in self._checks:
            rows = self._rows[self._survivors]
            kept.append(tuple(self._where[rows[~self._lasting[rows]]].tolist()))

    monkeypatch.setattr(narrowing.Narrowing, "written", noting)
    return kept


def request(with_text=False):
    """A prompt of new documents, and its parts; between some of them is text, if asked for."""
    parts = [draw(random.randint(1, 50)), *(draw(length) for length in random.sample(LENGTHS, 4)), draw(9)]
    ids, boundaries = join(parts)
    if with_text:
        del boundaries[random.choice([2, 3])]
    return ids, boundaries


def assembled(reference, ids, boundaries, policy, ratio):
    parsed = reference.parser.parse(ids, boundaries)
    with reference.engine.session():
        return reference.assemble(parsed, ratio, 0, policy_named(policy))


@pytest.mark.parametrize("with_text", [False, True], ids=["documents", "text between"])
@pytest.mark.parametrize("policy", SPECS)
def test_both_engines_keep_the_same_tokens_and_kv(llm, read, reference, kept_there, monkeypatch, policy, with_text):
    ids, boundaries = request(with_text)
    ratio = random.uniform(0.4, 0.9)
    expected = assembled(reference, ids, boundaries, policy, ratio)
    placed, choices = note_placed(monkeypatch), note_choices(monkeypatch)
    [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=ratio, policy=policy)
    assert chosen_last() == expected.recomputed
    assert kept_last() == tuple(kept_there)
    first, *_, last = map(len, (chosen_last(), *kept_last()))
    assert 0 < last <= first
    assert last < first or "shrink=1)" in policy
    [(probe, selection)] = choices
    assert probe.charged_ratio(selection) == expected.charged_ratio
    assert expected.charged_ratio > 0.5 * ratio or "threshold" in policy
    # All KV before the question, also of tokens that were dropped on the way.
    count = boundaries[-1][0]
    blocks = placed[-1][1][0]
    for ours, theirs in zip(read(blocks, count), (expected.kv.k, expected.kv.v), strict=True):
        torch.testing.assert_close(ours, theirs[:, :, :count], atol=1e-4, rtol=1e-4)
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)


@pytest.mark.parametrize("policy", SPECS)
def test_ratio_one_is_a_full_prefill(llm, policy):
    ids, boundaries = request()
    [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, policy=policy)
    same(ours, plain_answer(llm, ids), tolerance=1e-4)


def test_a_budget_below_the_probe_recomputes_nothing(llm):
    ids, boundaries = request()
    [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.1, policy=POLICY)
    assert llm.reset_prefix_cache()
    [moved] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0)
    same(ours, moved, tolerance=1e-4)


def test_the_same_prompt_is_computed_as_before(llm):
    """The tokens that the checks kept are remembered: also if vLLM still has some of the blocks, in which nothing is
    measured again."""
    ids, boundaries = request()
    params = {"boundaries": boundaries, "recompute_ratio": 0.6, "policy": POLICY}
    [first] = ask(llm, ids, **params)
    kept = kept_last()
    assert kept[0]
    assert llm.reset_prefix_cache()
    [again] = ask(llm, ids, **params)
    same(again, first, tolerance=1e-4)
    pool, most = block_pool(llm), boundaries[-1][0] // SMALL["block_size"]
    for count in range(1, most):  # later blocks are evicted first when other requests need room
        for block_hash in list(pool.cached_block_hash_to_block._cache)[count:]:
            block = pool.cached_block_hash_to_block.get_one_block(block_hash)
            if block is not None:
                pool._maybe_evict_cached_block(block)
        [partly] = ask(llm, ids, **params)
        same(partly, first, tolerance=1e-4)
    assert kept_last() == kept
    forget_kept()
    assert llm.reset_prefix_cache()
    [anew] = ask(llm, ids, **params)
    same(anew, first, tolerance=1e-4)
    assert kept_last() == kept


def test_a_batch_with_other_policies(llm):
    """Each request of a batch gets the answer that it gets alone."""
    prompts = [request(with_text) for with_text in (False, True, False, False, True, False)]
    policies = [POLICY, "composite", SPECS[1], "kv-deviation", SPECS[3], "sink-link"]
    ratios = [0.6, 0.3, 0.5, 0.5, 0.7, 0.3]
    params = [
        {"boundaries": boundaries, "recompute_ratio": ratio, "policy": policy}
        for (_, boundaries), ratio, policy in zip(prompts, ratios, policies, strict=True)
    ]
    alone = [ask(llm, ids, **given)[0] for (ids, _), given in zip(prompts, params, strict=True)]
    others = [draw(30), draw(300)]
    theirs = [plain_answer(llm, ids) for ids in others]
    for _ in range(2):
        assert llm.reset_prefix_cache()
        order = random.sample(range(len(prompts)), len(prompts))
        given = [{"prompt_token_ids": prompts[index][0]} for index in order]
        sampling = [greedy(8, logprobs=3, detokenize=False, params=params[index]) for index in order]
        given += [{"prompt_token_ids": ids} for ids in others]
        sampling += [greedy(8, logprobs=3, detokenize=False)] * len(others)
        together = llm.generate(given, sampling, use_tqdm=False)
        for index, ours in zip(order, together, strict=False):
            same(ours, alone[index], tolerance=1e-4)
        for ours, plain in zip(together[len(order) :], theirs, strict=True):
            same(ours, plain, tolerance=1e-4)


def test_more_runs_than_the_backend_takes(llm, reference, kept_there, monkeypatch):
    ids, boundaries = request()
    expected = assembled(reference, ids, boundaries, POLICY, 0.5)
    limit_runs(monkeypatch, 5)
    [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.5, policy=POLICY)
    assert (chosen_last(), kept_last()) == (expected.recomputed, tuple(kept_there))
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)


def test_a_failure_on_the_way_is_prefilled(llm, monkeypatch):
    ids, boundaries = request()
    before = hooked_modules()
    with monkeypatch.context() as patch:
        patch.setattr("kvmosaic.engines.vllm.worker_side.narrower._Thinning._farthest", fail)
        [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.6, policy=POLICY)
    assert hooked_modules() == before
    same(ours, plain_answer(llm, ids), tolerance=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An engine with short steps."""
    model = write_tiny_llama(tmp_path_factory.mktemp("small"), num_hidden_layers=8)
    return start(model, miss_policy="fill-first", skip_tokenizer_init=True, max_num_batched_tokens=STEP)


def test_engines_that_do_not_use_it_have_no_hooks(small):
    llm, before = small, hooked_modules()
    for policy, ratio in (("composite", 0.3), ("kv-deviation(layers=0)", 0.5), ("kv-deviation(layers=0+1)", 1.0)):
        ids, boundaries = request()
        ask(llm, ids, boundaries=boundaries, recompute_ratio=ratio, policy=policy)
        assert (hooked_modules(), has_measured_layers()) == (before, False)
    ids, boundaries = request()
    ask(llm, ids, boundaries=boundaries, recompute_ratio=0.7, policy="kv-deviation(layers=0+1)")
    assert (hooked_modules(), has_measured_layers()) == (before, True)
    assert kept_last() is not None


def note_fallbacks(monkeypatch):
    """Why the worker prefilled requests from now on."""
    counted, stats = [], worker_side().stats
    count = stats.count_alike

    def noting(name, label, *rest):
        if name == "fallbacks":
            counted.append(label)
        count(name, label, *rest)

    monkeypatch.setattr(stats, "count_alike", noting)
    return counted


def test_more_tokens_than_a_pass_takes_are_prefilled(small, monkeypatch):
    """Few tokens on average, but many in the first layers."""
    ids, boundaries = join([draw(10), draw(380), draw(400), draw(9)])
    counted = note_fallbacks(monkeypatch)
    ask(small, ids, boundaries=boundaries, recompute_ratio=0.0)  # documents are stored
    assert small.reset_prefix_cache()
    params = {"boundaries": boundaries, "recompute_ratio": 0.6}
    [ours] = ask(small, ids, policy="kv-deviation(layers=1+2, shrink=100)", **params)
    assert len(chosen_last()) > STEP
    assert counted == [Fallback.SHRINKING_SET]
    same(ours, plain_answer(small, ids), tolerance=1e-4)
    assert small.reset_prefix_cache()
    ask(small, ids, policy="kv-deviation(layers=1)", **params)  # in several passes
    assert counted == [Fallback.SHRINKING_SET]


def measured_layers():
    side = worker_side()
    return layers_that_narrow(side.forward, loaded_model(side.forward._runner), VOCABULARY, side.ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_trial_notices_a_model_that_joins_the_rows_of_ranks(small, monkeypatch, ranks):
    """vLLM's DeepSeek does, if there are fewer hidden states than positions."""
    assert small.reset_prefix_cache()
    assert measured_layers() is not None
    cut = Narrowing._cut

    def joined(self, tensor, axis):
        if tensor.shape[axis] == len(self._left):
            tensor = torch.cat([tensor] * ranks, axis)
            tensor = tensor.narrow(axis, 0, min(tensor.shape[axis], self._whole))
        return cut(self, tensor, axis)

    monkeypatch.setattr(Narrowing, "_cut", joined)
    assert measured_layers() is None


def test_the_trial_notices_slots_of_other_tokens(small, monkeypatch):
    assert small.reset_prefix_cache()
    replace = metadata.replace_sequences

    def keeping_slots(told, slots):
        replace(told, get_forward_context().slot_mapping)

    monkeypatch.setattr(metadata, "replace_sequences", keeping_slots)
    assert measured_layers() is None


def add_a_layer(side):
    """The model has a list of four modules, and three attention layers."""
    modules = loaded_model(side.forward._runner).modules()
    [layers] = [module for module in modules if isinstance(module, torch.nn.ModuleList)]
    layers.append(torch.nn.Identity())
    return layers.pop


def share_caches(side):
    kv = side.forward.kv
    kv.has_shared_caches = True
    return lambda *_: setattr(kv, "has_shared_caches", False)


@pytest.mark.parametrize("change", [add_a_layer, share_caches])
def test_models_whose_layers_do_not_allow_it_are_prefilled(small, monkeypatch, caplog, change):
    side, (ids, boundaries) = worker_side(), request()
    params = {"boundaries": boundaries, "recompute_ratio": 0.7, "policy": "kv-deviation(layers=0+1)"}
    counted = note_fallbacks(monkeypatch)
    monkeypatch.setattr(side.loader._narrower, "_is_measured", False)
    monkeypatch.setattr(side.loader._narrower, "_layers", None)
    mirror = scheduler_side(small)._mirror
    monkeypatch.setattr(mirror, "cannot_narrow", False)
    undo = change(side)
    try:
        [ours] = ask(small, ids, **params)
        assert mirror.cannot_narrow  # so the next such request is not loaded at all
        [line] = [each.getMessage() for each in caplog.records if "cannot shrink" in each.getMessage()]
    finally:
        undo(-1)
    assert "kv-deviation(layers=0+1)" in line
    assert counted == [Fallback.SHRINKING_SET]
    same(ours, plain_answer(small, ids), tolerance=1e-4)


def test_all_tokens_can_be_dropped(small):
    """The pass then ends, and the KV of later layers stays as it was."""
    side, blocks = worker_side(), [[1, 2]]
    run = Run(draw(40), 0, blocks)
    noted = []

    def thin(layer, left, k, v):
        noted.append((layer, len(left)))
        return [None, np.arange(40) < 7, np.zeros(7, dtype=bool)][len(noted) - 1]

    assert small.reset_prefix_cache()
    layers = measured_layers()
    assert side.forward.narrow(Narrowing(side.forward.kv.make_pass([run]), layers, thin)) is None
    assert noted == [(0, 40), (1, 40), (2, 7)]
    noted.clear()

    def thin_early(layer, left, k, v):
        noted.append((layer, len(left)))
        return np.zeros(40, dtype=bool)

    assert side.forward.narrow(Narrowing(side.forward.kv.make_pass([run]), layers, thin_early)) is None
    assert noted == [(0, 40)]
