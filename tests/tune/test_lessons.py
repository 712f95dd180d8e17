"""Lessons: the same number is the same prompt, chunks are documents, and what is held out is never learned."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.eval.synthetic import synthetic
from kvmosaic.tune.corpus import MAKERS
from kvmosaic.tune.lessons import Lessons, from_documents, from_examples
from kvmosaic.tune.material import Material
from kvmosaic.tune.passages import MIN_WORDS, split_into_passages

WORDS = ("the", "a", "ship", "mill", "river", "old", "seven", "of", "winter", "bridge", "who", "sold", "bread")


def random_text(rng, sentences):
    return " ".join(
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 20))).capitalize() + "." for _ in range(sentences)
    )


@pytest.fixture(scope="module")
def parser(tokenizer):
    return ChunkTokenParser(tokenizer, None, 16)


@pytest.mark.parametrize("maker", dict.fromkeys(MAKERS), ids=lambda maker: maker.__name__)
def test_made_up_lessons_are_prompts(parser, tokenizer, maker):
    lessons = Lessons(parser, tokenizer, [maker], 900, random.randrange(2**31))
    for number in range(5):
        prompt = lessons[number]
        assert prompt == lessons[number]
        assert len(prompt.tokens) <= 900
        assert prompt.chunks
        assert prompt.compared.start >= prompt.chunks[-1].end
        assert prompt.compared.end == len(prompt.tokens)
        assert all(len(span) >= 16 for span in prompt.chunks)


def test_lessons_from_the_users_data(parser, tokenizer):
    rng = random.Random(random.randrange(2**31))
    passages = split_into_passages(random_text(rng, 200), rng)
    makers = [from_documents(passages), from_examples(synthetic(20, rng.randrange(99)))]
    lessons = Lessons(parser, tokenizer, makers, 1200, rng.randrange(99))
    prompts = [lessons[number] for number in range(20)]
    assert {prompt.kind for prompt in prompts} == {"documents", "examples"}
    for prompt in prompts:
        if prompt.kind == "documents":
            assert any(passage in tokenizer.decode(prompt.tokens) for passage in passages)


@given(st.text(max_size=2000), st.integers(0, 99))
def test_any_text_can_be_split(text, seed):
    at = 0
    for passage in split_into_passages(text, random.Random(seed)):
        assert len(passage.split()) >= MIN_WORDS
        at = text.index(passage, at) + len(passage)  # in order, none overlapping


def test_held_out_documents_are_not_learned_from():
    rng = random.Random(random.randrange(2**31))
    documents = [f"Document {number}. {random_text(rng, 12)}" for number in range(60)]
    material = Material.of(documents, synthetic(80, 1), 0)
    sides = []
    for makers in (material.learned, material.held_out):
        lessons = [maker(random.Random(seed)) for maker in makers[1:] for seed in range(60)]
        sides.append({document for each in lessons if each.kind == "documents" for document in each.documents})
    assert sides[0]
    assert sides[1]
    assert sides[0].isdisjoint(sides[1])


@pytest.mark.parametrize("documents", [["short"], ["A few words. " * 30], ["x " * 100] * 3])
def test_too_few_documents_are_refused(documents):
    with pytest.raises(ConfigError, match="too few documents"):
        Material.of(documents, [], 0)


def test_too_few_examples_are_refused():
    with pytest.raises(ConfigError, match="too few examples"):
        Material.of([], synthetic(2, 0), 0)
