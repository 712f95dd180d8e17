"""Treatment of chunks that are not in the store."""

import pytest
import torch

from kvmosaic.engines.hf.chat import chat_prompt, messages_about
from kvmosaic.hf import LLM

DOCUMENTS = [
    "The ferry to Orsa leaves at 7:40 from the north pier. Its captain is Maud Lind.",
    "The bakery on Mill Street belongs to Agnes Bell. She bakes rye bread on Mondays.",
]

MESSAGES = messages_about("You are helpful.", DOCUMENTS, "Who is the captain?")


def parse(llm):
    return llm.parser.parse_named(chat_prompt(llm.tokenizer, MESSAGES).token_ids, DOCUMENTS).prompt


def engine(narrow, tokenizer, miss_policy):
    return LLM(narrow, tokenizer, enable_chunk_cache=True, miss_policy=miss_policy)


@pytest.mark.parametrize("miss_policy", ["background", "never"])
def test_new_documents_are_answered_exactly(narrow, tokenizer, miss_policy):
    llm = engine(narrow, tokenizer, miss_policy)
    parsed = parse(llm)
    with llm.engine.session():
        full, ours = llm.full_prefill(parsed), llm.assemble(parsed, 0.0)
    torch.testing.assert_close(ours.logits, full.logits, atol=1e-4, rtol=0)
    [first] = llm.chat(MESSAGES, documents=DOCUMENTS, max_tokens=8, temperature=0)
    [exact] = llm.chat(MESSAGES, documents=DOCUMENTS, max_tokens=8, temperature=0, use_chunk_cache=False)
    assert first.token_ids == exact.token_ids
    assert first.mode == "plain"
    assert [(chunk.status, chunk.reason) for chunk in first.chunks] == [("prefilled", "new")] * 2
    [second] = llm.chat(MESSAGES, documents=DOCUMENTS, max_tokens=8, temperature=0)
    if miss_policy == "background":
        assert second.mode == "reuse"
        assert [chunk.status for chunk in second.chunks] == ["cached"] * 2
    else:
        assert second.mode == "plain"
        assert llm.chunk_cache.get_stats()["total_chunks"] == 0


def test_a_new_document_among_known_ones_is_computed_in_sight_of_them(narrow, tokenizer):
    llm = engine(narrow, tokenizer, "background")
    llm.chunk_cache.warm(DOCUMENTS[:1])
    [first] = llm.chat(MESSAGES, documents=DOCUMENTS, max_tokens=2, temperature=0)
    assert [chunk.status for chunk in first.chunks] == ["cached", "prefilled"]
    assert first.prefilled_tokens > len(first.chunks[1].span)
    [second] = llm.chat(MESSAGES, documents=DOCUMENTS, max_tokens=2, temperature=0)
    assert [chunk.status for chunk in second.chunks] == ["cached", "cached"]


def test_filled_behind_the_answer_is_what_filling_first_gives(narrow, tokenizer):
    """Entries are the same, whenever they are made."""
    behind, first = engine(narrow, tokenizer, "background"), engine(narrow, tokenizer, "fill-first")
    behind.chat(MESSAGES, documents=DOCUMENTS, max_tokens=1)
    parsed = parse(behind)
    logits = []
    for llm in (behind, first):
        with llm.engine.session():
            logits.append(llm.assemble(parsed, 0.0).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
