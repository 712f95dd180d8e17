"""Documents in 8 bits inside vLLM: entries, answers, and the parts that stay exact."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    LATENT,
    OURS,
    PART,
    answer,
    as_before,
    ask,
    draw,
    forget,
    forget_fast_copies,
    join,
    plain,
    plain_answer,
    prompt,
    report,
    same,
    start,
    statuses,
    store,
    stored_entry,
)

pytestmark = pytest.mark.engine

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 2048, "entry_dtype": "int8"}
LENGTHS = (21, 33, 48, 64, 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def llm(tiny_llama, folder):
    return start(tiny_llama, disk_path=folder, prefix_blocks=True, **SETTINGS)


def random_prompt(system=45):
    """A system prompt that ends inside a block, documents and a question, as tokens; and its boundaries."""
    return join([draw(system), *map(draw, LENGTHS), draw(7)])


def embedded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = OURS | {"chunk_separator": None, "entry_dtype": "int8", "miss_policy": "fill-first"}
    return HFEngine(model, None, enable_chunk_cache=True, **settings)


def kinds():
    """Dtypes of the entries in the fastest tier, by kind."""
    entries = [stored_entry(info.key) for info in store().scan()]
    return {(entry.kind, entry.data.dtype) for entry in entries if entry is not None}


def check_against(reference, llm):
    """The first token has the same probability as in the embedded engine, which also stores 8 bits."""
    ids, boundaries = random_prompt()
    with reference.engine.session():
        expected = reference.assemble(reference.parser.parse(ids, boundaries), 0.0).logits.log_softmax(-1)
    [filled] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0, report=True)
    assert statuses(filled) == ["filled"] * len(LENGTHS)
    for token, seen in filled.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(expected[token]), abs=2e-3)
    assert llm.reset_prefix_cache()
    [found] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0, report=True)
    assert statuses(found) == ["cached"] * len(LENGTHS)
    same(found, filled)  # new chunks are served as they are stored


def test_ratio_zero_is_that_of_the_embedded_engine(llm, tiny_llama):
    check_against(embedded(tiny_llama), llm)


def test_ratio_one_is_plain_vllm(llm):
    for _ in range(2):
        ids, boundaries = random_prompt()
        ask(llm, ids, boundaries=boundaries)
        assert llm.reset_prefix_cache()
        [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, report=True)
        assert statuses(ours) == ["cached"] * len(LENGTHS)
        same(ours, plain_answer(llm, ids))


def test_only_documents_are_in_8_bits(llm):
    ids, boundaries = random_prompt()
    ask(llm, ids, boundaries=boundaries)
    ask(llm, draw(2 * PART + 9))
    forget(llm)
    assert kinds() == {
        ("document", torch.int8),
        ("system-tail", torch.float32),
        ("prefix-part", torch.float32),
    }
    listed = {info.key.is_int8 for info in store().scan()}
    assert listed == {True, False}


def test_exact_prefixes_come_back_bit_for_bit(llm):
    tokens = draw(3 * PART + 40)
    [first] = ask(llm, tokens)
    forget(llm)
    [again] = ask(llm, tokens)
    assert again.num_cached_tokens == 3 * PART
    as_before(again, first)


def test_from_disk_too(llm, folder):
    """The scheduler asks for documents and for parts of a prefix under their own keys."""
    ids, boundaries = random_prompt()
    [first] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0)
    tokens = draw(2 * PART + 40)
    [exact] = ask(llm, tokens)
    forget(llm)
    forget_fast_copies()
    ask(llm, draw(5))  # the scheduler learns what is stored
    forget(llm)
    [again] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0, report=True)
    assert [chunk["tier"] for chunk in report(again)["chunks"]] == ["disk"] * len(LENGTHS)
    same(again, first)
    [prefix] = ask(llm, tokens)
    assert prefix.num_cached_tokens == 2 * PART
    as_before(prefix, exact)
    sizes = {info.key: info.nbytes for info in store().scan() if info.kind == "document"}
    rows = [key.num_tokens for key in sizes]
    own = next(entry for key in sizes if (entry := stored_entry(key)) is not None).format
    assert all(nbytes >= own.nbytes(tokens) for nbytes, tokens in zip(sizes.values(), rows, strict=True))


def test_an_engine_of_the_other_kind_finds_exact_parts_alone(llm, folder, tiny_llama):
    """This is the last test, because it ends the engine of the others."""
    ids, boundaries = random_prompt()
    tokens = draw(PART + 40)
    ask(llm, ids, boundaries=boundaries)
    ask(llm, tokens)
    forget(llm)
    store().flush()
    other = start(tiny_llama, disk_path=folder, prefix_blocks=True, **SETTINGS | {"entry_dtype": "auto"})
    ask(other, draw(5))
    [output] = ask(other, ids, boundaries=boundaries, report=True)
    assert statuses(output) == ["filled"] * len(LENGTHS)
    [prefix] = ask(other, tokens)
    assert prefix.num_cached_tokens == PART
    assert other.get_stats()["corrupt_set_aside"] == 0
    assert {dtype for kind, dtype in kinds() if kind == "document"} == {torch.float32}
    # The other way round: exact copies of other documents do not count as stored.
    ids, boundaries = random_prompt()
    ask(other, ids, boundaries=boundaries)
    store().flush()
    again = start(tiny_llama, disk_path=folder, prefix_blocks=True, **SETTINGS)
    ask(again, draw(5))
    [output] = ask(again, ids, boundaries=boundaries, report=True)
    assert statuses(output) == ["filled"] * len(LENGTHS)
    [prefix] = ask(again, tokens)
    assert prefix.num_cached_tokens == PART


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's GPU kernels have no MLA in float32")
def test_a_latent_and_its_rotated_columns_have_scales_of_their_own(tiny_deepseek):
    llm = start(tiny_deepseek, num_gpu_blocks_override=200, **SETTINGS | {"max_model_len": 1024} | LATENT)
    check_against(embedded(tiny_deepseek), llm)
    entry = next(
        each for info in store().scan() if (each := stored_entry(info.key)) is not None and each.kind == "document"
    )
    assert (entry.format.k_dim, entry.format.v_dim, entry.data.dtype) == (512, 64, torch.int8)
    ids, boundaries = random_prompt()
    [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
    same(ours, plain_answer(llm, ids))


def test_layers_with_a_sliding_window_keep_their_tails(tiny_gemma):
    llm = start(tiny_gemma, **SETTINGS | {"max_model_len": 1024})
    check_against(embedded(tiny_gemma), llm)
    ids, boundaries = random_prompt()
    [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
    same(ours, plain_answer(llm, ids))


@pytest.mark.long
def test_a_real_model_says_the_same(tmp_path):
    text = prompt("You are helpful.", DOCUMENTS, "The head librarian is")
    answers = []
    for dtype in ("auto", "int8"):
        llm = start("smollm2-135m", miss_policy="fill-first", entry_dtype=dtype)
        [output] = answer(llm, [text], recompute_ratio=0.0)
        answers.append(output)
        [whole] = answer(llm, [text], recompute_ratio=1.0)
        same(whole, plain(llm, [text])[0])
    exact, small = answers
    assert small.outputs[0].token_ids == exact.outputs[0].token_ids
    for mine, yours in zip(small.outputs[0].logprobs, exact.outputs[0].logprobs, strict=True):
        for token in mine.keys() & yours.keys():
            assert mine[token].logprob == pytest.approx(yours[token].logprob, abs=0.1)
