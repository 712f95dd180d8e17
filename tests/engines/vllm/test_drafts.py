"""Draft models with KV. They only propose tokens, so answers are those without them. Their KV of a document is stored
with the document's, so that as many proposals are accepted after reuse as after a prefill."""

import logging
from typing import Any

import pytest
import torch
import vllm

from kvmosaic.core.learned_sink import LearnedSink, SinkAbout, witness_tokens
from kvmosaic.models.sink_file import save_sink
from tests.engines.vllm.helpers import (
    ask,
    chosen_last,
    core_scheduler,
    draw,
    fill_alone,
    forget,
    greedy,
    join,
    kept_last,
    model_config,
    plain_answer,
    report,
    same,
    start,
    statuses,
    store,
    stored_entry,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import VOCABULARY, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.entries import kv_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        vllm.__version__.startswith("0.23.") and not torch.cuda.is_available(),
        reason="vLLM 0.23 itself cannot sample after drafts on CPUs",
    ),
]

LENGTHS = (21, 33, 48, 64)
SETTINGS: dict[str, Any] = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "prefix_blocks": True}
KEPT = 0.9
"""Minimum share of proposals that are accepted from a draft model that equals the served model."""
TOKENS = 40
"""Number of tokens of an answer whose proposals are counted."""


def drafts(method: str, model: str, count: int = 2) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": model, "num_speculative_tokens": count}}


def prompts(documents: list[list[int]]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Two prompts of the same documents in different orders."""
    return [join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])]


def counts(llm) -> tuple[float, float]:
    """The tokens that drafts have proposed, and those of them that were accepted."""
    found = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return tuple(found[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))


def accepted(llm, *given: list[int], **params: Any) -> float:
    """The share of proposals that are accepted while these prompts are answered."""
    before = counts(llm)
    ask(llm, *given, max_tokens=TOKENS, **params)
    proposed, taken = (now - then for now, then in zip(counts(llm), before, strict=True))
    return taken / proposed


def acceptance(llm, documents: list[list[int]]) -> dict[str, float]:
    """The share of accepted proposals without a chunk cache, and in several ways with one."""
    found = {}
    for name, params in {
        "plain": {"chunk_cache": False},
        "filled": {"recompute_ratio": 0.0},
        "reused": {"recompute_ratio": 0.0},
        "blended": {"recompute_ratio": 0.4, "policy": "random"},
        "all": {"recompute_ratio": 1.0},
    }.items():
        ids, boundaries = join([draw(30), *documents, draw(7)])
        assert llm.reset_prefix_cache()
        found[name] = accepted(llm, ids, boundaries=boundaries, **params)
    return found


WRITERS = {
    "draft_model": lambda folder, target: write_tiny_llama(folder, num_hidden_layers=2),
    "eagle": write_tiny_eagle,
    "eagle3": write_tiny_eagle3,
}
"""Functions that write a draft model of each method."""


@pytest.fixture(scope="module", params=[*WRITERS])
def llm(request, tiny_llama, tmp_path_factory):
    model = WRITERS[request.param](tmp_path_factory.mktemp("draft") / "model", tiny_llama)
    return start(tiny_llama, **drafts(request.param, model), **SETTINGS)


def test_exact_prefixes_are_answered_as_before(llm):
    conversation = draw(700)
    [first] = ask(llm, conversation, max_tokens=20)
    forget(llm)
    [again] = ask(llm, conversation, max_tokens=20)
    assert again.num_cached_tokens >= 256
    same(again, first)


def test_a_filled_chunk_has_the_kv_that_the_draft_model_computes_in_a_prefill(llm):
    """The reference is what vLLM's own step computed for a prompt that begins with the sink and the chunk."""
    sink = worker_side().cache.sink
    prompt = [*sink, *draw(600)]
    before = {info.key for info in store().scan()}
    ask(llm, prompt)
    forget(llm)
    parts = [stored_entry(info.key) for info in store().scan() if info.key not in before]
    [reference] = [part for part in parts if part.kind == "prefix-part" and not part.context]
    end = len(reference.tokens)
    k, v = fill_alone(sink, prompt[len(sink) : end + 5])
    kv = worker_side().forward.kv
    assert len(kv.drafts) == len(kv.of_draft_model) >= 1
    assert len(k[0]) == len(kv) + len(kv.drafts)
    for ours, theirs in zip((k, v), kv_of(reference), strict=True):
        ours, theirs = ours[:, :, : end - len(sink)], theirs[:, :, len(sink) :]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
        assert float(theirs[:, len(kv) :].abs().mean()) > 1e-3


def test_a_chunk_that_is_filled_in_pieces_has_the_same_kv(llm, monkeypatch):
    """Where a pass or a slice ends, the token behind it is known."""
    side, sink, chunk = worker_side(), worker_side().cache.sink, draw(90)
    whole = fill_alone(sink, chunk)
    monkeypatch.setattr(type(side.forward), "step_tokens", 32)
    for ours, theirs in zip(fill_alone(sink, chunk), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_reused_prompts_are_answered_as_without_drafts(llm, tiny_llama):
    """This is the last test, because it starts another engine, without drafts."""
    documents = [draw(length) for length in LENGTHS]
    given = prompts(documents)
    answers = []
    for ids, boundaries in given:
        [output] = ask(llm, ids, boundaries=boundaries, report=True)
        answers.append(output)
    assert statuses(answers[1]) == ["cached"] * len(LENGTHS)
    assert report(answers[1])["reused_tokens"] == sum(LENGTHS)
    assert {info.key.num_tokens for info in store().scan()} >= set(LENGTHS)
    exact = []
    for ids, boundaries in given:
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
        same(output, plain_answer(llm, ids))
        exact.append(output)
    layers, name = len(worker_side().forward.kv), worker_side().names.fingerprint
    without = start(tiny_llama, **SETTINGS)
    assert layers == len(worker_side().forward.kv) == 3
    assert name != worker_side().names.fingerprint, "entries with and without the KV of drafts have the same name"
    for (ids, boundaries), ours, all_of_it in zip(given, answers, exact, strict=True):
        [theirs] = ask(without, ids, boundaries=boundaries)
        same(ours, theirs)
        same(all_of_it, plain_answer(without, ids))


@pytest.mark.parametrize("method", WRITERS)
def test_with_sets_that_shrink_from_layer_to_layer_answers_are_those_without_drafts(method, tmp_path):
    """The draft model then keeps the KV that was stored with the documents."""
    target = write_tiny_llama(tmp_path / "target", num_hidden_layers=8)  # EAGLE-3 reads three different layers
    model = WRITERS[method](tmp_path / "draft", target)
    given, seen = prompts([draw(length) for length in LENGTHS]), []
    for settings in (drafts(method, model), {}):
        llm, results = start(target, **SETTINGS | settings), []
        for ids, boundaries in given:
            params = {"boundaries": boundaries, "recompute_ratio": 0.7, "policy": "kv-deviation(layers=1+2)"}
            [output] = ask(llm, ids, max_tokens=20, **params)
            results.append((output, chosen_last(), kept_last()))
        seen.append(results)
        assert bool(worker_side().forward.kv.drafts) == bool(settings)
    for (ours, *kept), (theirs, *expected) in zip(*seen, strict=True):
        assert kept == expected
        assert expected[1] is not None
        same(ours, theirs)


@pytest.fixture
def own_draft(tiny_llama):
    """An engine whose draft model is the served model."""
    return start(tiny_llama, **drafts("draft_model", tiny_llama, 3), **SETTINGS)


def test_drafts_are_accepted_after_reuse(own_draft):
    found = acceptance(own_draft, [draw(length) for length in LENGTHS])
    print(f"accepted: {found}")
    assert min(found.values()) >= KEPT, found


def test_without_stored_kv_of_drafts_fewer_are_accepted(own_draft, monkeypatch):
    """What the other tests would see if the KV were missing."""
    kv, documents = worker_side().forward.kv, [draw(length) for length in LENGTHS]
    acceptance(own_draft, documents)
    write = kv.write
    monkeypatch.setattr(kv, "write", lambda layer, *rest: None if layer in kv.drafts else write(layer, *rest))
    if torch.cuda.is_available():
        pytest.skip("our kernel writes all layers in one launch")
    found = acceptance(own_draft, documents)
    assert found["reused"] < KEPT <= found["plain"], found


def test_with_a_learned_sink_the_draft_model_has_a_text(own_draft, tiny_llama, tmp_path):
    """A sink is learned for the served model alone."""
    layers, sink = len(worker_side().forward.kv), tmp_path / "sink.safetensors"
    k, v = (part[:, :layers, :40].transpose(0, 1).contiguous() for part in fill_alone((), draw(41)))
    _, witness = fill_alone((), witness_tokens(VOCABULARY))
    about = SinkAbout(model="tiny", kl_before=1, kl_after=1, kvmosaic="x")
    save_sink(LearnedSink(k, v, witness[:, layers - 1].contiguous(), about), sink)
    llm = start(tiny_llama, sink_prefix=f"learned:{sink}", **drafts("draft_model", tiny_llama, 3), **SETTINGS)
    side = worker_side()
    assert side.off_reason is None
    text = [model_config().hf_text_config.bos_token_id] * 40  # there is no tokenizer
    placed, learned = kv_of(side._filler._sink), (k, v)
    for ours, theirs, other in zip(placed, fill_alone((), text), learned, strict=True):
        torch.testing.assert_close(ours[:, layers:].cpu(), theirs[:, layers:].cpu(), rtol=1e-4, atol=1e-4)
        assert torch.equal(ours[:, :layers].cpu(), other.transpose(0, 1).cpu())
    found = acceptance(llm, [draw(length) for length in LENGTHS])
    print(f"accepted after a learned sink: {found}")
    assert min(found["plain"], found["all"]) >= KEPT


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_batch_with_preemptions_gives_what_each_request_gives_alone(method, tiny_llama, tmp_path):
    is_own = method == "draft_model"
    model = tiny_llama if is_own else write_tiny_eagle(tmp_path / "eagle", tiny_llama)
    little = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 64, "max_model_len": 512}
    llm = start(tiny_llama, **drafts(method, model), **SETTINGS | little)
    documents = [draw(length) for length in LENGTHS]
    given = [join([draw(9), *documents[::step], draw(6)]) for step in (1, -1, 2)]
    ratios = (0.0, 0.4, 1.0)
    settings = [{"boundaries": at, "recompute_ratio": ratio} for (_, at), ratio in zip(given, ratios, strict=True)]
    given.append((draw(150), []))
    settings.append({"chunk_cache": False})
    alone = [ask(llm, ids, max_tokens=80, **params)[0] for (ids, _), params in zip(given, settings, strict=True)]
    scheduler, preempted = core_scheduler(llm), []
    preempt = scheduler._preempt_request

    def noting(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = noting
    before = counts(llm)
    params = [greedy(80, logprobs=3, detokenize=False, params=each) for each in settings]
    together = llm.generate([{"prompt_token_ids": ids} for ids, _ in given], params, use_tqdm=False)
    for ours, theirs in zip(together, alone, strict=True):
        same(ours, theirs)
    assert preempted, "the engine has too much room for this test"
    proposed, taken = (now - then for now, then in zip(counts(llm), before, strict=True))
    print(f"accepted in a batch with {len(preempted)} preemptions: {taken / proposed:.3f}")
    if is_own:
        assert taken / proposed >= KEPT


def test_a_draft_model_of_another_shape_is_left_out(tiny_llama, tmp_path, caplog, monkeypatch):
    """The KV of all layers is in one group of vLLM's cache. Entries hold the served model's."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    narrow = write_tiny_llama(tmp_path / "narrow", kv_heads=2, num_hidden_layers=2)
    llm = start(tiny_llama, **drafts("draft_model", narrow), **SETTINGS)
    lines = {each.getMessage() for each in caplog.records}
    [line] = [line for line in lines if "KV of the draft model" in line]
    assert "2 KV heads" in line
    assert narrow in line
    kv = worker_side().forward.kv
    assert (len(kv), len(kv.of_draft_model), kv.drafts) == (3, 2, [])
    given = prompts([draw(length) for length in LENGTHS])
    ours = [ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0)[0] for ids, boundaries in given]
    exact = [ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)[0] for ids, boundaries in given]
    without = start(tiny_llama, **SETTINGS)
    for (ids, boundaries), reused, all_of_it in zip(given, ours, exact, strict=True):
        same(reused, ask(without, ids, boundaries=boundaries, recompute_ratio=0.0)[0])
        same(all_of_it, plain_answer(without, ids))


def test_drafts_of_two_ranks_are_accepted(tiny_llama):
    with EngineApart(tiny_llama, ranks=2, **drafts("draft_model", tiny_llama, 3), **SETTINGS) as engine:
        found = engine.call(acceptance, [draw(length) for length in LENGTHS])
    print(f"accepted, two ranks: {found}")
    assert min(found.values()) >= KEPT, found
