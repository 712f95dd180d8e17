"""Conversations with documents in every turn, beside plain vLLM: the same history is found again, nothing but
documents is stored, and answers stay what they were."""

import random

import pytest

from tests.engines.vllm.helpers import DOCUMENTS, SEPARATOR, SMALL, ask, report, same, start, store

pytestmark = pytest.mark.engine

BLOCK, TURNS = SMALL["block_size"], 5


@pytest.fixture(scope="module")
def llm(tiny_text):
    return start(tiny_text, miss_policy="fill-first")


class Conversation:
    """Turns of random documents and questions; the model's own answers are its history."""

    def __init__(self, tokenizer, number):
        rng = random.Random(number)
        self._tokenizer = tokenizer
        self._turns = []
        for turn in range(TURNS):
            documents = [
                f"{each} Note {rng.randrange(10**6)}." for each in rng.sample(DOCUMENTS, rng.choice([1, 2, 3]))
            ]
            self._turns.append(SEPARATOR.join(["", *documents, f"Question {turn}: what does it say?"]))

    def hold(self, llm, **params):
        """Each turn's output, its prompt, and how much of the prompt is the history that the turn before computed."""
        messages = [{"role": "system", "content": "You answer in a few words, from what you are given."}]
        outputs, known = [], []
        for turn in self._turns:
            messages.append({"role": "user", "content": turn})
            tokens = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            [output] = ask(llm, tokens, max_tokens=12, **params)
            said = list(output.outputs[0].token_ids)
            outputs.append((output, tokens, _common(known, tokens)))
            known = [*tokens, *said[:-1]]  # the last one was never computed
            messages.append({"role": "assistant", "content": self._tokenizer.decode(said)})
        return outputs


def _common(known, tokens):
    pairs = zip(known, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))


@pytest.fixture(scope="module")
def conversation(tokenizer):
    return Conversation(tokenizer, random.randrange(2**32))


def test_at_ratio_one_answers_and_prefix_hits_are_those_of_plain_vllm(llm, conversation):
    theirs = conversation.hold(llm, chunk_cache=False)
    assert llm.reset_prefix_cache()
    ours = conversation.hold(llm, recompute_ratio=1.0, report=True)
    for (mine, tokens, _), (yours, same_tokens, history) in zip(ours, theirs, strict=True):
        assert tokens == same_tokens
        same(mine, yours)
        assert yours.num_cached_tokens >= history // BLOCK * BLOCK
        assert report(mine)["prefix_tokens"] >= yours.num_cached_tokens


@pytest.mark.parametrize(("ratio", "policy"), [(0.0, "composite"), (0.3, "sink-link"), (0.3, "composite")])
def test_each_turn_finds_what_the_turn_before_computed_and_its_own_documents(llm, tokenizer, ratio, policy):
    conversation = Conversation(tokenizer, random.randrange(2**32))
    conversation.hold(llm)  # from here on the store has its documents
    assert llm.reset_prefix_cache()
    for output, tokens, history in conversation.hold(llm, recompute_ratio=ratio, policy=policy, report=True):
        told = report(output)
        assert told["prefix_tokens"] >= history // BLOCK * BLOCK
        spans = [chunk["span"] for chunk in told["chunks"]]
        texts = [tokenizer.decode(tokens[span["start"] : span["end"]]) for span in spans]
        assert texts == [SEPARATOR + each for each in _documents(tokenizer.decode(tokens))]
        new = sum(span["end"] - max(span["start"], told["prefix_tokens"]) for span in spans if span["end"] > history)
        assert told["reused_tokens"] >= int((1 - ratio) * new) - len(spans)


def _documents(text):
    """What stands between two separators of one message."""
    return [
        document
        for message in text.split("<|im_start|>user\n")[1:]
        for document in message.partition("<|im_end|>")[0].split(SEPARATOR)[1:-1]
    ]


def test_nothing_but_documents_is_stored(llm, tokenizer):
    assert llm.llm_engine.reset_prefix_cache(reset_connector=True)
    conversation = Conversation(tokenizer, random.randrange(2**32))
    _, tokens, _ = conversation.hold(llm)[-1]
    texts = [tokenizer.decode(store()._stack.known.read(0, info.key)[0].tokens) for info in store().scan()]
    documents = {SEPARATOR + each for each in _documents(tokenizer.decode(tokens))}
    system = [text for text in texts if text not in documents]
    assert len(system) <= 1  # the end of the system prompt, which no user wrote


def test_a_conversation_asked_again_gives_the_same_answers(llm, tokenizer):
    """From vLLM's prefix cache in one turn, put together from documents in the other."""
    conversation = Conversation(tokenizer, random.randrange(2**32))
    first = conversation.hold(llm, recompute_ratio=0.0)
    assert llm.reset_prefix_cache()
    for (again, tokens, _), (before, same_tokens, _) in zip(
        conversation.hold(llm, recompute_ratio=0.0), first, strict=True
    ):
        assert tokens == same_tokens
        same(again, before)
