"""Conversations with documents in every turn, compared with plain vLLM: the same history is found again, only
documents are stored, and answers stay the same."""

import random

import pytest

from tests.engines.vllm.helpers import DOCUMENTS, SEPARATOR, SMALL, greedy, report, same, start, store

pytestmark = pytest.mark.engine

BLOCK, TURNS = SMALL["block_size"], 5
SYSTEM = {"role": "system", "content": "You answer in a few words, from what you are given."}


@pytest.fixture(scope="module")
def llm(tiny_text):
    return start(tiny_text, miss_policy="fill-first")


class Conversation:
    """Turns of random documents and questions. The model's own answers are the history."""

    def __init__(self, tokenizer, number):
        rng = random.Random(number)
        self._tokenizer = tokenizer
        self._turns = []
        self.documents = []
        for turn in range(TURNS):
            documents = [
                f"{each} Note {rng.randrange(10**6)}." for each in rng.sample(DOCUMENTS, rng.choice([1, 2, 3]))
            ]
            self.documents += documents
            self._turns.append(self._messages(documents, f"Question {turn}: what does it say?", rng))

    def _messages(self, documents, question, rng):
        raise NotImplementedError

    def is_document(self, text):
        raise NotImplementedError

    def hold(self, llm, **params):
        """Output and prompt of each turn, and the number of the prompt's tokens that the turn before computed."""
        messages, outputs, known = [SYSTEM], [], []
        for turn in self._turns:
            messages += turn
            [output] = llm.chat(messages, greedy(12, logprobs=1, params=params), use_tqdm=False)
            tokens, said = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
            outputs.append((output, tokens, _common(known, tokens)))
            known = [*tokens, *said[:-1]]  # the last one was never computed
            messages.append({"role": "assistant", "content": self._tokenizer.decode(said)})
        return outputs


class WithSeparators(Conversation):
    """Documents are marked in the text."""

    def _messages(self, documents, question, rng):
        return [{"role": "user", "content": SEPARATOR.join(["", *documents, question])}]

    def is_document(self, text):
        return text.removeprefix(SEPARATOR) in self.documents


class WithParts(Conversation):
    """Documents are parts of the user's message, or results of tools."""

    def _messages(self, documents, question, rng):
        asked = {"type": "text", "text": question}
        if rng.random() < 0.5:
            parts = [{"type": "text", "text": f"Source {n}: {each}"} for n, each in enumerate(documents, 1)]
            return [{"role": "user", "content": [*parts, asked]}]
        results = [{"role": "tool", "tool_call_id": str(n), "content": each} for n, each in enumerate(documents)]
        calls = {"role": "assistant", "content": "I look it up."}
        return [{"role": "user", "content": [asked]}, calls, *results]

    def is_document(self, text):
        """Whether the text is a document, except for the words at its ends, which may merge with their neighbours."""
        return any(text in each and len(text) > 0.7 * len(each) for each in self.documents)


@pytest.fixture(params=[WithSeparators, WithParts], ids=["separators", "parts"])
def make(request, tokenizer):
    """Makes conversations."""
    return lambda: request.param(tokenizer, random.randrange(2**32))


def _common(known, tokens):
    pairs = zip(known, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))


def test_at_ratio_one_answers_and_prefix_hits_are_those_of_plain_vllm(llm, make):
    conversation = make()
    theirs = conversation.hold(llm, chunk_cache=False)
    assert llm.reset_prefix_cache()
    ours = conversation.hold(llm, recompute_ratio=1.0, report=True)
    for (mine, tokens, _), (yours, same_tokens, history) in zip(ours, theirs, strict=True):
        assert tokens == same_tokens
        same(mine, yours)
        assert yours.num_cached_tokens >= history // BLOCK * BLOCK
        assert report(mine)["prefix_tokens"] >= yours.num_cached_tokens


@pytest.mark.parametrize(("ratio", "policy"), [(0.0, "composite"), (0.3, "sink-link"), (0.3, "composite")])
def test_each_turn_finds_what_the_turn_before_computed_and_its_own_documents(llm, tokenizer, make, ratio, policy):
    conversation = make()
    conversation.hold(llm)  # from here on the store has its documents
    assert llm.reset_prefix_cache()
    for output, tokens, history in conversation.hold(llm, recompute_ratio=ratio, policy=policy, report=True):
        told = report(output)
        assert told["prefix_tokens"] >= history // BLOCK * BLOCK
        spans = [chunk["span"] for chunk in told["chunks"]]
        texts = [tokenizer.decode(tokens[span["start"] : span["end"]]) for span in spans]
        assert all(map(conversation.is_document, texts)), texts
        asked = tokenizer.decode(tokens)
        assert len(texts) == sum(asked.count(each) for each in conversation.documents)
        new = sum(span["end"] - max(span["start"], told["prefix_tokens"]) for span in spans if span["end"] > history)
        assert told["reused_tokens"] >= int((1 - ratio) * new) - len(spans)


def test_nothing_but_documents_is_stored(llm, tokenizer, make):
    assert llm.llm_engine.reset_prefix_cache(reset_connector=True)
    conversation = make()
    conversation.hold(llm)
    texts = [tokenizer.decode(store()._stack.known.read(0, info.key)[0].tokens) for info in store().scan()]
    system = [text for text in texts if not conversation.is_document(text)]
    assert len(texts) > len(system)
    assert len(system) <= 1  # the end of the system prompt, which is no document


def test_a_conversation_asked_again_gives_the_same_answers(llm, make):
    """In one turn vLLM's prefix cache has the blocks, in the other they are assembled from documents."""
    conversation = make()
    first = conversation.hold(llm, recompute_ratio=0.0)
    assert llm.reset_prefix_cache()
    for (again, tokens, _), (before, same_tokens, _) in zip(
        conversation.hold(llm, recompute_ratio=0.0), first, strict=True
    ):
        assert tokens == same_tokens
        same(again, before)
