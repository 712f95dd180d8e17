"""The parser finds separators in token ids, whatever they merged with."""

import itertools
import logging
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.limits import MAX_CHUNKS
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import Span
from kvmosaic.core.separator import BITS, _words, random_separator
from kvmosaic.core.token_bytes import TokenBytes

SEPARATOR = " # # "
SEPARATORS = [SEPARATOR, "\n\n", "###", " <sep> ", "—"]


def parts(tokenizer, prompt):
    return [tokenizer.decode(prompt.tokens_of(span)) for span in (prompt.system, *prompt.chunks, prompt.question)]


def test_separator_belongs_to_the_part_it_precedes(tokenizer):
    parser = ChunkTokenParser(tokenizer, SEPARATOR)
    prompt = parser.parse("You are helpful. # # Document A # # Question?")
    assert parts(tokenizer, prompt) == ["You are helpful.", " # # Document A", " # # Question?"]


def test_text_and_token_ids_agree(tokenizer):
    parser = ChunkTokenParser(tokenizer, SEPARATOR)
    text = "sys # # one # # two # # three # # q"
    assert parser.parse(text) == parser.parse(tokenizer.encode(text))


@pytest.mark.parametrize("separator", SEPARATORS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.text("abcXYZ", min_size=1, max_size=9), min_size=1, max_size=6))
def test_every_prompt_is_cut_where_the_text_says(tokenizer, separator, pieces):
    prompt = ChunkTokenParser(tokenizer, separator).parse(separator.join(pieces))
    assert len(prompt.chunks) == max(0, len(pieces) - 2)
    found = [tokenizer.decode(prompt.tokens_of(span)).replace(separator, "") for span in prompt.chunks]
    assert found == pieces[1:-1]


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.text(max_size=12), min_size=1, max_size=6), separator=st.sampled_from(SEPARATORS))
def test_any_text_is_covered_and_no_chunk_is_empty(tokenizer, separator, pieces):
    tokens = tokenizer.encode(separator.join(pieces))
    if not tokens:
        return
    prompt = ChunkTokenParser(tokenizer, separator).parse(tokens)
    covered = [*prompt.fresh_positions(), *(i for span in prompt.chunks for i in span.positions)]
    assert sorted(covered) == list(range(len(tokens)))
    assert all(tokenizer.decode(prompt.tokens_of(span)).encode().strip() for span in prompt.chunks)


NEIGHBOURS = st.sampled_from(["Paris", "#", "a b", "x.", "été", "日本", "(1)", "\tz"])


@settings(max_examples=100, deadline=None)
@given(words=st.lists(NEIGHBOURS, min_size=3, max_size=8))
def test_a_chunk_has_the_same_tokens_between_any_neighbours(tokenizer, words):
    parser = ChunkTokenParser(tokenizer, SEPARATOR)
    document = "The Cormorant leaves at six"
    first = parser.parse(" # # ".join([words[0], document, words[1]]))
    other = parser.parse(" # # ".join([*words, document, "another question"]))
    wanted = parser.document_tokens(document)
    assert wanted in {first.tokens_of(span) for span in first.chunks}
    assert wanted in {other.tokens_of(span) for span in other.chunks}


def test_a_separator_that_melts_into_its_neighbour_is_still_found(tokenizer):
    """``.—`` is one token: it stays with the text it ends, and the chunk starts behind it."""
    parser = ChunkTokenParser(tokenizer, "—")
    prompt = parser.parse("Be brief.—The Cormorant leaves at six—When?")
    assert parts(tokenizer, prompt) == ["Be brief.—", "The Cormorant leaves at six", "—When?"]


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("just one part", 0),
        ("system # # question", 0),
        (" # # ", 0),
        (" # #  # #  # # ", 0),
        ("s # #  # # q", 0),
        ("s # # a # #  # # b # # q", 2),
        (" # # a # # q", 1),
        ("s # # a # # ", 1),
        ("s # # a # # what does # # mean?", 2),  # a separator in the question ends a chunk before it
    ],
)
def test_odd_prompts(tokenizer, text, chunks):
    prompt = ChunkTokenParser(tokenizer, SEPARATOR).parse(text)
    assert len(prompt.chunks) == chunks
    assert len(prompt.question) > 0
    covered = sorted([*prompt.fresh_positions(), *(i for span in prompt.chunks for i in span.positions)])
    assert covered == list(range(len(prompt.token_ids)))


def test_empty_chunks_are_skipped_with_a_warning(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        prompt = ChunkTokenParser(tokenizer, SEPARATOR).parse("s # # a # #  # #   # # b # # q")
    assert len(prompt.chunks) == 2
    assert "2 empty chunk" in caplog.text


def test_boundaries_replace_the_search():
    parser = ChunkTokenParser(None)
    prompt = parser.parse(range(205), boundaries=[(0, 3), (3, 100), (100, 100), (100, 203), (203, 205)])
    assert prompt.chunks == (Span(3, 100), Span(100, 203))
    assert (prompt.system, prompt.question) == (Span(0, 3), Span(203, 205))


def test_text_between_boundaries_is_ordinary():
    prompt = ChunkTokenParser(None).parse(range(30), boundaries=[(0, 3), (5, 9), (9, 9), (12, 20), (22, 30)])
    assert prompt.chunks == (Span(5, 9), Span(12, 20))
    assert list(prompt.fresh_positions()) == [*range(5), *range(9, 12), *range(20, 30)]


@pytest.mark.parametrize(
    "boundaries",
    [
        [],
        [(0, 10)],
        [(0, 3), (2, 10)],
        [(1, 3), (3, 10)],
        [(0, 3), (3, 9)],
        [(0, 5), (5, 3), (3, 10)],
        [(0, 5), (5, 10), (10, 10)],
    ],
)
def test_wrong_boundaries_are_refused_in_one_line(boundaries):
    with pytest.raises(PromptError) as error:
        ChunkTokenParser(None).parse(range(10), boundaries=boundaries)
    assert "\n" not in str(error.value)


def test_refusals(tokenizer):
    with pytest.raises(PromptError, match="empty"):
        ChunkTokenParser(tokenizer, SEPARATOR).parse([])
    with pytest.raises(PromptError, match="empty"):
        ChunkTokenParser(tokenizer, SEPARATOR).parse("")
    with pytest.raises(PromptError, match="no tokenizer"):
        ChunkTokenParser(None).parse("text")


def test_a_separator_the_vocabulary_lacks_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="does not survive"):
        ChunkTokenParser(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), " # # ")


# --- what is worth storing, and how much of it


def test_chunks_that_are_too_short_are_ordinary_text(tokenizer):
    text = "System." + "".join(f" # # {'word ' * length}" for length in (3, 30, 1, 40)) + " # # Question?"
    every = ChunkTokenParser(tokenizer, SEPARATOR).parse(text)
    some = ChunkTokenParser(tokenizer, SEPARATOR, min_chunk_tokens=16).parse(text)
    assert [len(span) >= 16 for span in every.chunks] == [False, True, False, True]
    assert some.chunks == (every.chunks[1], every.chunks[3])
    assert some.token_ids == every.token_ids


def test_shortest_chunks_by_boundaries():
    parser = ChunkTokenParser(None, min_chunk_tokens=16)
    prompt = parser.parse(list(range(60)), [(0, 5), (5, 20), (20, 36), (36, 60)])
    assert prompt.chunks == (Span(20, 36),)


def test_chunks_beyond_the_limit_are_ordinary_text_and_one_line_says_so(tokenizer, caplog):
    text = "System." + " # # word word" * (MAX_CHUNKS + 10) + " # # Question?"
    prompt = ChunkTokenParser(tokenizer, SEPARATOR).parse(text)
    assert len(prompt.chunks) == MAX_CHUNKS
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    edges = [(number, number + 1) for number in range(MAX_CHUNKS + 12)]
    assert len(ChunkTokenParser(None).parse(list(range(MAX_CHUNKS + 12)), edges).chunks) == MAX_CHUNKS


def test_short_chunks_do_not_count_towards_the_limit():
    lengths = [1] * MAX_CHUNKS + [20, 20]
    ends = [*itertools.accumulate([3, *lengths, 5])]
    prompt = ChunkTokenParser(None, min_chunk_tokens=16).parse(list(range(ends[-1])), [*pairwise([0, *ends])])
    assert [len(span) for span in prompt.chunks] == [20, 20]


@pytest.mark.parametrize("separator", [None, ""])
def test_with_the_separator_switched_off_no_text_cuts_a_prompt(tokenizer, separator):
    parser = ChunkTokenParser(tokenizer, separator)
    assert parser.parse("System. # # A document. # # Question?").chunks == ()
    ids = tokenizer.encode("System. # # A document. # # Question?")
    assert parser.parse(ids, [(0, 3), (3, 9), (9, len(ids))]).chunks == (Span(3, 9),)
    document = "A document # # of two parts."
    assert tokenizer.decode(parser.document_tokens(document)) == document.removeprefix("A").removesuffix(".")


def test_a_prompt_of_nothing_but_separators_takes_no_longer_than_another(tokenizer):
    ids = tokenizer.encode(" # # ", add_special_tokens=False) * 200_000
    assert ChunkTokenParser(tokenizer, SEPARATOR).parse(ids).chunks == ()


@pytest.mark.parametrize("token", [-1, 2**40, 10**30, 49152])
def test_a_token_that_is_none_stands_for_no_text(tokenizer, token):
    assert TokenBytes(tokenizer)[token] == b""


# --- unguessable separators


def test_random_separators(tokenizer):
    drawn = [random_separator(tokenizer) for _ in range(5)] + [random_separator() for _ in range(5)]
    assert len(set(drawn)) == 10
    for separator in drawn:
        parser = ChunkTokenParser(tokenizer, separator)
        parts = ["Be brief. # # no", "One document.", "Paris? # # Still the same document", "Question?"]
        prompt = parser.parse(separator.join(parts))
        texts = [tokenizer.decode(prompt.tokens_of(span)) for span in prompt.chunks]
        assert texts == [f"{separator}{part}" for part in parts[1:-1]]
    assert max(len(tokenizer.encode(separator)) for separator in drawn[:5]) <= 8
    words = len(_words(tokenizer))
    assert (len(drawn[0].split()) - 1) * math.log2(words) >= BITS
