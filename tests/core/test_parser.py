"""The parser: separators found in token ids, whatever they merged with."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import Span

SEPARATORS = [" # # ", "\n\n", "###", " <sep> ", "—"]


def parts(tokenizer, prompt):
    return [tokenizer.decode(prompt.tokens_of(span)) for span in (prompt.system, *prompt.chunks, prompt.question)]


def test_separator_belongs_to_the_part_it_precedes(tokenizer):
    parser = ChunkTokenParser(tokenizer)
    prompt = parser.parse("You are helpful. # # Document A # # Question?")
    assert parts(tokenizer, prompt) == ["You are helpful.", " # # Document A", " # # Question?"]


def test_text_and_token_ids_agree(tokenizer):
    parser = ChunkTokenParser(tokenizer)
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
    parser = ChunkTokenParser(tokenizer)
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
    prompt = ChunkTokenParser(tokenizer).parse(text)
    assert len(prompt.chunks) == chunks
    assert len(prompt.question) > 0
    covered = sorted([*prompt.fresh_positions(), *(i for span in prompt.chunks for i in span.positions)])
    assert covered == list(range(len(prompt.token_ids)))


def test_empty_chunks_are_skipped_with_a_warning(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        prompt = ChunkTokenParser(tokenizer).parse("s # # a # #  # #   # # b # # q")
    assert len(prompt.chunks) == 2
    assert "2 empty chunk" in caplog.text


def test_boundaries_replace_the_search():
    parser = ChunkTokenParser(None)
    prompt = parser.parse(range(205), boundaries=[(0, 3), (3, 100), (100, 100), (100, 203), (203, 205)])
    assert prompt.chunks == (Span(3, 100), Span(100, 203))
    assert (prompt.system, prompt.question) == (Span(0, 3), Span(203, 205))


@pytest.mark.parametrize(
    "boundaries",
    [
        [],
        [(0, 10)],
        [(0, 3), (4, 10)],
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
        ChunkTokenParser(tokenizer).parse([])
    with pytest.raises(PromptError, match="empty"):
        ChunkTokenParser(tokenizer).parse("")
    with pytest.raises(ConfigError, match="separator is empty"):
        ChunkTokenParser(tokenizer, "")
    with pytest.raises(PromptError, match="no tokenizer"):
        ChunkTokenParser(None).parse("text")


def test_a_separator_the_vocabulary_lacks_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="does not survive"):
        ChunkTokenParser(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), " # # ")
