"""Which tokens a sink prefix stands for."""

import pytest

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.sink import sink_tokens

BOS = 7


def encode(text):
    """One token a character."""
    return tuple(map(ord, text))


@pytest.mark.parametrize("bos", [BOS, None])
def test_presets(bos):
    start = [] if bos is None else [bos]
    assert sink_tokens("none", " # # ", bos, None) == []
    assert sink_tokens("bos", " # # ", bos, None) == start
    document = sink_tokens("document", " # # ", bos, encode)
    assert document[: len(start)] == start
    text = "".join(map(chr, document[len(start) :]))
    assert text.count(" # # ") == 3
    assert text.endswith(" # # ")
    # The passages are kept apart as those of requests are.
    assert "".join(map(chr, sink_tokens("document", "|", None, encode))) == text.replace(" # # ", "|")


@pytest.mark.parametrize("text", ["bso", "BOS", "A text of one's own.", ""])
def test_all_else_is_a_text_and_exactly_its_own_tokens(text):
    assert sink_tokens(text, " # # ", BOS, encode) == list(encode(text))


def test_a_text_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="'a text': a text needs a tokenizer"):
        sink_tokens("a text", " # # ", BOS, None)


def test_the_default_does_not():
    assert sink_tokens(load_config().sink_prefix, " # # ", BOS, None) == [BOS]


def test_the_neutral_text_is_short(tokenizer):
    def plain(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert 120 <= len(sink_tokens("document", " # # ", 0, plain)) <= 180


def test_without_a_separator_the_neutral_text_has_paragraphs():
    asked = []

    def encode(text):
        asked.append(text)
        return [7]

    assert sink_tokens("document", None, 1, encode) == [1, 7]
    assert asked[0].count("\n\n") == 3
    assert sink_tokens("bos", None, 1, encode) == [1]
