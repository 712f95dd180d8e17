"""Lessons: the same number gives the same prompt, chunks are documents, and held-out texts are never learned."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.eval.base import Example
from kvmosaic.eval.data import load
from kvmosaic.eval.synthetic import synthetic
from kvmosaic.tune.corpus import MAKERS
from kvmosaic.tune.lessons import Lessons, from_documents, from_examples
from kvmosaic.tune.material import Material, is_held_out
from kvmosaic.tune.passages import MIN_WORDS, count_words, lesson_about, split_into_passages

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
    lessons = Lessons(parser, tokenizer, [lambda rng, max_words: maker(rng)], 900, random.randrange(2**31))
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
        assert count_words(passage) >= MIN_WORDS
        at = text.index(passage, at) + len(passage)  # in order, none overlapping


def test_held_out_documents_are_not_learned_from():
    rng = random.Random(random.randrange(2**31))
    documents = [f"Document {number}. {random_text(rng, 12)}" for number in range(60)]
    material = Material.of(documents, [], [], 0)
    sides = []
    for makers in (material.learned[1:], material.held_out):
        lessons = [maker(random.Random(seed), 500) for maker in makers for seed in range(60)]
        assert {each.kind for each in lessons} == {"documents"}
        sides.append({document for each in lessons for document in each.documents})
    assert all(sides)
    assert sides[0].isdisjoint(sides[1])


def test_held_out_examples_share_no_document_with_others(tmp_path):
    """There are several questions about each paragraph, and paragraphs also occur in prompts of others."""
    rng = random.Random(random.randrange(2**31))
    paragraphs = [
        {"context": random_text(rng, 6), "qas": [{"question": f"{n}?", "answers": [{"text": "x"}]} for n in range(3)]}
        for _ in range(80)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    sides = [load(str(path), 999, 0, keep=keep) for keep in (is_held_out, lambda text: not is_held_out(text))]
    texts = [{chunk for example in side for chunk in example.chunks} for side in sides]
    assert all(texts)
    assert texts[0].isdisjoint(texts[1])
    assert texts[0] | texts[1] == {paragraph["context"] for paragraph in paragraphs}


def test_questions_about_the_same_document_are_on_the_same_side(tmp_path):
    rng = random.Random(random.randrange(2**31))
    path, documents = tmp_path / "own.jsonl", [f"{random_text(rng, 6)} The code is {n}x." for n in range(60)]
    records = [
        {"system": "Read.", "chunks": [documents[n]], "question": f"{q}?", "answers": [f"{n}x"]}
        for n in range(60)
        for q in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    sides = [load(str(path), 999, 0, keep=keep) for keep in (is_held_out, lambda text: not is_held_out(text))]
    texts = [{chunk for example in side for chunk in example.chunks} for side in sides]
    assert all(texts)
    assert texts[0].isdisjoint(texts[1])


def test_questions_are_about_documents_that_are_there(parser, tokenizer):
    """Documents that do not fit are left out before the questions are chosen."""
    rng = random.Random(random.randrange(2**31))
    passages = split_into_passages(random_text(rng, 300), rng)
    make = from_documents(passages)
    for number in range(30):
        made = make(random.Random(number), 200)
        assert sum(map(count_words, made.documents)) <= 200 or len(made.documents) == 1
        for quoted in re.findall(r'What follows "(.*?)"', made.question):
            assert any(quoted in document for document in made.documents)


def test_many_questions_of_examples_come_with_the_documents_that_answer_them():
    texts = [f"The password of room {number} is word-{number}, and nobody else knows it." for number in range(30)]
    rng = random.Random(random.randrange(2**31))
    examples = [
        Example(
            "",
            tuple(rng.sample([text, *rng.sample(texts, 3)], 4)),
            f"What opens room {number}?",
            (f"word-{number},",),
        )
        for number, text in enumerate(texts)
    ]
    make, most = from_examples(examples), 0
    for number in range(60):
        made = make(random.Random(number), 400)
        asked = [example for example in examples if example.question in made.question]
        most = max(most, len(asked))
        for example in asked:
            assert any(example.answers[0] in document for document in made.documents)
    assert most > 2


def test_texts_without_blanks_are_passages():
    text = "这是一段没有空格的文字，里面有很多句子。" * 400
    passages = split_into_passages(text, random.Random(0))
    assert len(passages) > 3
    assert max(map(len, passages)) < len(text) / 2
    made = lesson_about(passages, random.Random(1), "documents")
    assert len(made.question) < 400


def test_identifiers_have_more_tokens_than_words(parser, tokenizer):
    rng = random.Random(random.randrange(2**31))
    chunks = tuple("\n".join(f"{rng.getrandbits(128):032x}" for _ in range(5)) for _ in range(12))
    examples = [Example("", chunks, "Which is it?", (chunks[index % 12][:32],)) for index in range(40)]
    lessons = Lessons(parser, tokenizer, [from_examples(examples)], 600, rng.randrange(99))
    assert all(0 < len(lessons[number].chunks) < 12 for number in range(10))


def test_a_lesson_that_never_fits_is_an_error(parser, tokenizer):
    with pytest.raises(ConfigError, match="no lesson"):
        Lessons(parser, tokenizer, [from_documents(["word " * 3000])], 300, 0)[0]


@pytest.mark.parametrize("documents", [["short"], ["A few words. " * 30], ["x " * 100] * 3])
def test_too_few_documents_are_refused(documents):
    with pytest.raises(ConfigError, match="too few documents"):
        Material.of(documents, [], [], 0)


def test_too_few_examples_are_refused():
    with pytest.raises(ConfigError, match="too few examples"):
        Material.of([], synthetic(40, 0), synthetic(1, 1), 0)
