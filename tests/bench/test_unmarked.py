"""Made-up traffic without marks has the promised properties, and its measurement is right."""

import random
from itertools import islice, pairwise

import pytest

from kvmosaic.bench.discovery import KINDS, measure
from kvmosaic.bench.unmarked import MARKERS, Unmarked, made_up


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_where_they_are_said_to_be_and_hold_no_marker(kind):
    documents, seed = made_up(60, random.Random(random.random())), random.random()
    prompts = list(islice(KINDS[kind](documents, random.Random(seed)), 30))
    assert prompts == list(islice(KINDS[kind](documents, random.Random(seed)), 30))
    texts = {tuple(document) for document in documents}
    named = [tuple(prompt.ids[start:end]) for prompt in prompts for start, end in prompt.documents]
    assert named
    assert all(MARKERS.isdisjoint(each) for each in named)
    if kind != "agent":  # whose files are several of them
        assert set(named) <= texts


def test_agents_forget_and_read_again():
    rng = random.Random(random.random())
    prompts = list(islice(KINDS["agent"](made_up(60, rng), rng), 40))
    lengths = [len(prompt.ids) for prompt in prompts]
    assert any(later < sooner for sooner, later in pairwise(lengths[:20]))


def test_what_is_measured():
    rng = random.Random(random.random())
    document = max(made_up(5, rng), key=len)  # of a short one, the share before its first cut may be larger

    def prompts():
        for first in (100, 101, 102, 102):
            yield Unmarked([first] * 20 + document + [first, 9], [(20, 20 + len(document))])

    row = measure(prompts())
    size = len(document) + 22
    assert (row["prompts"], row["tokens"]) == (4, 4 * size)
    assert row["behind_prefix"] == 3 * size + (size - (size - 1) // 16 * 16)  # the last one was sent before
    # The third one's; a part of the last one is cached.
    assert row["seen_twice"] == pytest.approx(len(document) / row["behind_prefix"], abs=1e-3)
    assert 0.2 < row["found"] <= row["seen_twice"] + 0.02  # a run may contain a token of the text around a document
