"""Recurring text is found from the third prompt on, with any text around it. Nothing else is found."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.discovery import MIN_RUN, Discovery
from kvmosaic.core.discovery.cuts import ENDING
from kvmosaic.core.prompt import Span
from tests.core.discovery.prompts import MARKER, PLENTY, Engine, contents, joined, text

ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 1, 3, 0), (1, 0, 3, 2)]
"""In the first two orders, no document follows the same document."""


def test_the_first_prompt_shows_a_document_the_second_makes_it_a_run_the_third_finds_it():
    engine, documents = Engine(), [text(220) for _ in range(4)]
    for number, order in enumerate(ORDERS):
        prompt = [*text(30), *joined(documents[index] for index in order), *text(20)]
        spans, reused = engine.send(prompt)
        if number == 0:
            assert spans == []
        else:
            assert sum(map(len, spans)) > 0.85 * 880
        assert (reused > 0.75) == (number >= 2)


def test_the_whole_document_is_one_run_also_where_a_part_of_it_came_back_first():
    engine = Engine()
    first, second = text(200), text(200)
    for begin in (first, [*text(9), *first], [*text(9), *first]):
        engine.send([*begin, *text(50)])
    whole = [*first, *second]
    lengths = []
    for _ in range(9):
        spans, _ = engine.send([*text(40), *whole, *text(40)])
        lengths.append([len(span) for span in spans])
    assert len(lengths[1]) == 2  # what is stored is used at first
    [length] = lengths[-1]
    assert length > 350


def test_documents_that_stand_beside_each_other_by_chance_stay_apart():
    engine, documents = Engine(), [text(200) for _ in range(6)]
    for _ in range(40):
        spans, _ = engine.send([*text(40), *joined(random.sample(documents, 4)), *text(20)])
    assert sum(len(span) < 210 for span in spans) >= 2


@given(st.integers(0, 2**32), st.booleans())
def test_every_run_is_a_text_that_an_earlier_prompt_had(seed, with_markers):
    rng = random.Random(seed)
    documents = [text(rng.randrange(5, 400), rng) for _ in range(6)]
    discovery, again, earlier = Discovery([MARKER], PLENTY), Discovery([MARKER], PLENTY), []
    again._hasher = discovery._hasher  # which entries the tables lose depends on its secrets
    stored = set()
    for _ in range(8):
        parts = [text(rng.randrange(30), rng)]
        for document in rng.choices(documents, k=rng.randrange(6)):
            parts += [document[: rng.choice([len(document), 150])], [MARKER] if with_markers else text(1, rng)]
        prompt = [*joined(parts), *text(rng.randrange(1, 9), rng)]
        places = sorted(rng.sample(range(len(prompt) + 1), 2)) if len(prompt) > 1 else [0, 1]
        covered = [Span(*places)] if rng.random() < 0.5 else []

        def is_stored(span, _first, prompt=prompt):
            return tuple(prompt[span.start : span.end]) in stored

        found = discovery.find(prompt, covered, None, is_stored)
        assert found == again.find(prompt, covered, None, is_stored)
        end = 0
        for span in found.chunks:
            assert end <= span.start
            end = span.end
        for span in (*found.chunks, *found.to_fill):
            assert 0 <= span.start < span.end < len(prompt)
            assert len(span) >= MIN_RUN
            assert MARKER not in prompt[span.start : span.end]
            assert not set(span.positions) & {position for each in covered for position in each.positions}
            tokens = prompt[span.start : span.end]
            assert any(
                tokens == other[at : at + len(tokens)] for other in earlier for at in _places(other, tokens[0])
            )
        for span in found.to_fill:
            inside = [chunk for chunk in found.chunks if chunk.start < span.end and span.start < chunk.end]
            assert inside
            assert all(is_stored(chunk, 0) for chunk in inside)
        stored.update(text for text in contents(prompt, found.chunks) if rng.random() < 0.8)
        earlier.append(prompt)


def _places(tokens, token):
    return [index for index, each in enumerate(tokens) if each == token]


@given(st.integers(0, 2**32))
def test_what_is_found_does_not_depend_on_what_stands_around(seed):
    rng = random.Random(seed)
    document = text(rng.randrange(120, 500), rng)
    found = []
    engine = Engine()
    for _ in range(5):
        left = text(rng.randrange(1, 60), rng)
        prompt = [*left, *document, *text(rng.randrange(1, 60), rng)]
        found.append([Span(span.start - len(left), span.end - len(left)) for span in engine.send(prompt)[0]])
    # Text around it may agree by chance on the cut at an edge.
    for spans in found[1:]:
        assert len(spans) == 1
        assert spans[0].start <= 60
        assert spans[0].end >= len(document) - 60


# --- where messages end


@pytest.mark.parametrize("ending", [[MARKER, 9], [9]], ids=["chat", "completion"])
@pytest.mark.parametrize("length", [5, 20, ENDING - 1])
def test_a_question_that_is_asked_again_is_not_in_a_run(ending, length):
    """It would not have seen the documents before the run."""
    engine, documents, question = Engine(), [text(200) for _ in range(3)], text(length)
    for order in ((0, 1, 2), (1, 0, 2), (0, 1, 2)):
        prompt = [*text(20), *joined(documents[index] for index in order), *question, *ending]
        spans, _ = engine.send(prompt)
    assert sum(map(len, spans)) > 0.8 * 600
    assert spans[-1].end <= len(prompt) - len(ending) - length


def test_a_document_that_was_found_elsewhere_is_reused_also_at_the_end_of_a_message():
    engine, document = Engine(), text(300)
    for _ in range(2):
        engine.send([*text(20), *document, *text(50)])
    [span], _ = engine.send([*text(20), *document, MARKER, 9])
    assert span.end > 320 - ENDING


def test_documents_at_the_end_of_a_message_become_one_run():
    engine, documents = Engine(), [text(200), text(200)]
    for order in ((0, 1), (1, 0), *[(0, 1)] * 9):
        prompt = [*text(20), *joined(documents[index] for index in order), MARKER, 9]
        spans, _ = engine.send(prompt)
    [length] = map(len, spans)
    assert length > 400 - ENDING


def test_text_before_a_named_document_is_not_the_end_of_a_message():
    engine, document = Engine(), text(300)
    for _ in range(2):
        named = Span(320, 420)
        spans, _ = engine.send([*text(20), *document, *text(100), *text(5)], [named])
    assert spans[-1].end == 320


# --- what the prefix cache has


def test_a_prompt_that_is_sent_again_has_no_runs():
    engine, prompt = Engine(), text(1000)
    assert [engine.send(prompt)[0] for _ in range(3)] == [[], [], []]


def test_a_conversation_that_goes_on_has_the_chunks_it_had():
    engine, documents = Engine(), [text(200) for _ in range(4)]
    talk = [*text(50), *documents[0], MARKER, *text(100), MARKER]
    assert engine.send(talk)[0] == []
    for _ in range(3):
        engine.send([*text(50), *documents[0], *documents[1], *text(30)])
    first, _ = engine.send([*talk, *documents[1], MARKER])
    assert contents([*talk, *documents[1]], first)  # the second document is a run now
    assert all(span.start >= len(talk) for span in first)  # the first one was no run when it was computed
    longer = [*talk, *documents[1], MARKER, *text(90), MARKER]
    assert engine.send([*longer, *text(80)])[0] == first
    assert engine.send(longer)[0] == first


def test_beginnings_that_the_prefix_cache_cannot_hold_are_looked_at_again():
    documents = [text(300), text(300)]
    for room, is_found in ((PLENTY, False), (2000, True), (0, True)):
        engine = Engine(prefix_tokens=room)
        prompt = joined(documents)
        engine.send([*prompt, 5])
        engine.send([*text(20), *prompt, 5])
        engine.send(text(3000))
        assert bool(engine.send([*prompt, 6])[0]) == is_found


# --- apart


def test_prompts_of_different_salts_never_see_each_other():
    engine, document = Engine(), text(300)
    for salt in (None, "mine", "yours", "\ud800"):
        assert engine.send([*text(20), *document, 5], salt=salt)[0] == []
    assert engine.send([*text(20), *document, 5], salt="mine")[0]
    assert engine.send([*text(20), *document, 5], salt="others")[0] == []


def test_what_is_named_already_is_no_run():
    engine, documents = Engine(), [text(200), text(200)]
    for _ in range(4):
        left = text(20)
        prompt = [*left, *joined(documents), *text(20), 5]
        named = Span(20, 220)
        spans, reused = engine.send(prompt, [named])
        assert all(span.start >= named.end for span in spans)
    assert reused > 0.35  # the document has 0.45 of the tokens, and its ends are left out


@given(st.integers(0, 2**32))
def test_no_run_is_in_what_is_covered_or_ends_with_the_prompt(seed):
    """This also holds where the prompt begins like an earlier one that had a run there."""
    rng = random.Random(seed)
    engine, document = Engine(), text(rng.randint(100, 200), rng)
    for _ in range(3):
        prompt = [*text(rng.randint(1, 20), rng), *document, *text(40, rng)]
        spans, _ = engine.send(prompt)
    assert spans
    ends = spans[-1].end
    assert all(span.end < ends for span in engine.send(prompt[:ends])[0])
    covered = Span(rng.randrange(ends), ends)
    assert all(span.end <= covered.start for span in engine.send(prompt[: ends + 1], [covered])[0])


@pytest.mark.parametrize("length", [1, MIN_RUN, MIN_RUN + 1])
def test_short_prompts(length):
    engine, prompt = Engine(), text(length)
    for _ in range(3):
        assert engine.send([*prompt])[0] == []
