"""Runs that became one longer run stay in use until the longer run is stored."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.discovery.runs import MAX_PIECES
from kvmosaic.core.prompt import Span
from tests.core.discovery.prompts import MARKER, Engine, contents, joined, text


def chain(documents, order):
    """A prompt of a RAG chain, in which each question has another system prompt. There is no text between documents,
    because two documents might count the same token of it as their own."""
    return [*text(20), *joined(documents[index] for index in order), *text(15), MARKER, 9]


def follow_a_chain():
    """Six questions. From the third on, most tokens of the documents are reused."""
    engine, documents = Engine(), [text(random.randrange(180, 400)) for _ in range(4)]
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), *(random.sample(range(4), 4) for _ in range(4))]
    for number, order in enumerate(orders):
        prompt = chain(documents, order)
        _, share = engine.send(prompt)
        if number >= 2:
            assert share * len(prompt) >= 0.7 * sum(map(len, documents)), orders


@pytest.mark.parametrize("traffic", range(60))
def test_an_unchanged_chain_reuses_its_documents_from_the_third_prompt_on(traffic):
    follow_a_chain()


def test_a_piece_that_ends_behind_its_run_is_used():
    random.seed(423)  # the next run would begin before it
    follow_a_chain()


class Pair:
    """Two documents that were found separately, and then occurred side by side until they became one run."""

    def __init__(self, salt=None):
        self.engine, self.salt = Engine(), salt
        self.documents = [text(200), text(200)]
        for order in ((0, 1), (1, 0), *[(0, 1)] * 9):
            prompt = self.prompt(order)
            found = self.find(prompt)
            if found.to_fill:
                break
            self.engine.stored.update(contents(prompt, found.chunks))
        assert {len(each) // 100 for each in self.engine.stored} == {1}  # each about as long as a document

    def prompt(self, order=(0, 1)):
        return [*text(30), *joined(self.documents[index] for index in order), *text(20)]

    def find(self, prompt):
        return self.engine.find(prompt, salt=self.salt)


@pytest.mark.parametrize("salt", [None, "mine"])
def test_pieces_are_chunks_until_the_whole_is_stored(salt):
    pair = Pair(salt)
    for _ in range(3):
        prompt = pair.prompt()
        found = pair.find(prompt)
        assert set(contents(prompt, found.chunks)) <= pair.engine.stored
        assert len(found.chunks) == 2
        [whole] = found.to_fill
        assert whole.start <= found.chunks[0].start + 32
        assert whole.end >= found.chunks[1].end - 32
    pair.engine.stored.update(contents(prompt, [whole]))
    prompt = pair.prompt()
    found = pair.find(prompt)
    assert set(contents(prompt, found.chunks)) <= pair.engine.stored
    assert (len(found.chunks), found.to_fill) == (1, ())
    assert len(found.chunks[0]) == len(whole)


def test_a_beginning_keeps_the_pieces_it_had():
    pair = Pair()
    prompt = pair.prompt()
    found = pair.find(prompt)
    pair.engine.stored.update(contents(prompt, found.to_fill))
    again = pair.find([*prompt, *text(80)])
    assert again.chunks == found.chunks
    assert again.to_fill == ()  # it is stored, or is being stored


@pytest.mark.parametrize("evicted", [0, 1])
def test_a_piece_that_was_evicted_is_text_of_its_own(evicted):
    pair = Pair()
    prompt = pair.prompt()
    before = pair.find(prompt)
    pair.engine.stored.difference_update(contents(prompt, [before.chunks[evicted]]))
    prompt = pair.prompt()
    found = pair.find(prompt)
    [left] = found.chunks
    assert contents(prompt, [left])[0] in pair.engine.stored
    assert len(left) == len(before.chunks[1 - evicted])
    assert [len(span) for span in found.to_fill] == [len(span) for span in before.to_fill]


def test_of_a_run_of_which_nothing_is_stored_the_whole_is_the_chunk():
    pair = Pair()
    [whole] = pair.find(pair.prompt()).to_fill
    pair.engine.stored.clear()
    found = pair.find(pair.prompt())
    assert [len(span) for span in found.chunks] == [len(whole)]
    assert found.to_fill == ()


@pytest.mark.parametrize("is_pair_stored", [False, True])
def test_a_piece_that_has_pieces(is_pair_stored):
    """Three documents become one run. Two of them became one run before."""
    pair = Pair()
    if is_pair_stored:
        prompt = pair.prompt()
        pair.engine.stored.update(contents(prompt, pair.find(prompt).to_fill))
    pair.documents.append(text(200))
    for order in ((2,), (2,), *[(0, 1, 2)] * 9):
        prompt = pair.prompt(order)
        found = pair.find(prompt)
        if any(len(span) > 500 for span in found.to_fill):
            break
        pair.engine.stored.update(contents(prompt, found.chunks))
    else:
        pytest.fail("it never became one")
    assert len(found.chunks) == (2 if is_pair_stored else 3)
    assert pair.engine.reused(prompt, found.chunks) > 0.8 * 600


def test_nothing_is_asked_about_runs_that_are_not_made_of_others():
    engine, document = Engine(), text(300)
    for _ in range(4):
        prompt = [*text(20), *document, 5]
        assert engine.discovery.find(prompt, is_stored=lambda *_: pytest.fail("asked")).to_fill == ()


def test_where_the_first_chunk_begins_is_told():
    pair = Pair()
    for covered, expected in (((), None), ((Span(0, 10),), 0)):
        prompt = pair.prompt()
        asked = []
        found = pair.engine.discovery.find(
            prompt, covered, None, lambda span, first, asked=asked: asked.append((span, first)) or True
        )
        [whole] = found.chunks
        assert {span for span, _ in asked} == {whole}
        assert {first for _, first in asked} == {whole.start if expected is None else expected}


@given(st.integers(0, 2**32), st.integers(2, 3 * MAX_PIECES))
def test_what_is_asked_about_is_linear_in_the_prompt(seed, count):
    """This also holds for many documents that became one run step by step, and of which nothing is stored in the
    end."""
    rng = random.Random(seed)
    engine, documents = Engine(), [text(rng.randrange(70, 120), rng) for _ in range(count)]
    for _ in range(2):
        for document in documents:
            engine.send([*text(9, rng), *document, *text(9, rng)])
    for end in range(2, count + 1, rng.randrange(1, 9)):
        for _ in range(3):
            engine.send([*text(9, rng), *joined(documents[:end]), 5])
    prompt, asked = [*text(9, rng), *joined(documents), *joined(documents), 5], []
    engine.discovery.find(prompt, is_stored=lambda span, _: bool(asked.append(len(span))))
    assert sum(asked) <= (MAX_PIECES + 1) * len(prompt)
    assert all(len(run.pieces or ()) <= 2 * MAX_PIECES for run in engine.discovery._runs._runs.values())
