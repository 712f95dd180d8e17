"""Made-up traffic has the promised properties, for any size and seed."""

import math
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.bench.steps import Request, hit_share, percentiles
from kvmosaic.bench.throughput import best_rate
from kvmosaic.bench.traffic import Corpus, arrivals, assemble, new_combinations, popular
from kvmosaic.core.errors import ConfigError

SEEDS = st.integers(0, 2**32)


@st.composite
def corpora(draw):
    documents = draw(st.integers(1, 30))
    return Corpus(documents, draw(st.integers(1, 8)), draw(st.integers(1, documents)), draw(SEEDS))


def trace(corpus, rate):
    """All random choices of a benchmark."""
    chance = corpus.rng("trace")
    times = arrivals(rate, 2.0, chance)
    texts, system = corpus.texts(), corpus.system()
    queries = islice(popular(corpus, chance), len(times))
    return [
        (at, assemble(system, [texts[i] for i in drawn], chance)) for at, drawn in zip(times, queries, strict=True)
    ]


@given(corpora(), st.floats(0.1, 20))
@settings(deadline=None)
def test_the_same_seed_is_the_same_trace(corpus, rate):
    again = Corpus(corpus.documents, corpus.document_tokens, corpus.per_query, corpus.seed)
    assert trace(corpus, rate) == trace(again, rate)
    other = Corpus(corpus.documents, corpus.document_tokens, corpus.per_query, corpus.seed + 1)
    assert trace(corpus, rate) != trace(other, rate)


@given(corpora())
@settings(deadline=None)
def test_a_prompt_is_system_documents_question(corpus):
    texts, system, chance = corpus.texts(), corpus.system(), corpus.rng("prompt")
    drawn = next(popular(corpus, chance))
    ids, boundaries = assemble(system, [texts[i] for i in drawn], chance)
    assert boundaries[0][0] == 0
    assert boundaries[-1][1] == len(ids) == corpus.prompt_tokens
    assert all(left[1] == right[0] for left, right in pairwise(boundaries))
    parts = [ids[start:end] for start, end in boundaries]
    assert parts[:-1] == [system, *(texts[i] for i in drawn)]


@given(corpora())
@settings(deadline=None)
def test_a_query_has_no_document_twice(corpus):
    for drawn in islice(popular(corpus, corpus.rng("queries")), 20):
        assert len(set(drawn)) == len(drawn) == corpus.per_query
        assert set(drawn) <= set(range(corpus.documents))


@pytest.mark.parametrize("seed", range(3))
def test_documents_are_asked_for_by_zipfs_law(seed):
    corpus, queries = Corpus(20, 1, 1, seed), 20_000
    counts = Counter(drawn[0] for drawn in islice(popular(corpus, corpus.rng("queries")), queries))
    norm = sum(1 / rank for rank in range(1, 21))
    for rank in range(1, 21):
        share = 1 / rank / norm
        assert abs(counts[rank - 1] - queries * share) < 5 * math.sqrt(queries * share * (1 - share))


@pytest.mark.parametrize("seed", range(3))
def test_more_popular_ones_are_in_more_queries_at_no_fixed_place(seed):
    corpus = Corpus(30, 1, 10, seed)
    queries = list(islice(popular(corpus, corpus.rng("queries")), 2000))
    counts = Counter(number for drawn in queries for number in drawn)
    thirds = [sum(counts[i] for i in range(first, first + 10)) for first in (0, 10, 20)]
    assert thirds == sorted(thirds, reverse=True)
    places = [drawn.index(0) for drawn in queries if 0 in drawn]
    assert 4 < sum(places) / len(places) < 5


@given(st.floats(0.5, 50), st.floats(0.1, 20), SEEDS)
@settings(deadline=None)
def test_arrivals_are_in_order_and_in_time(rate, seconds, seed):
    times = arrivals(rate, seconds, Corpus(seed=seed).rng("arrivals"))
    assert times
    assert times == sorted(times)
    assert all(0 <= at < seconds for at in times)


@pytest.mark.parametrize("rate", [0.5, 4.0, 32.0])
def test_arrivals_are_a_poisson_process(rate):
    seconds = 4000 / rate
    times = arrivals(rate, seconds, Corpus().rng("arrivals"))
    assert abs(len(times) - 4000) < 5 * math.sqrt(4000)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert 0.9 < deviation / mean < 1.1  # exponential


@given(st.integers(1, 12), st.data())
@settings(deadline=None)
def test_no_combination_comes_twice(documents, data):
    corpus = Corpus(documents, 1, data.draw(st.integers(1, documents)), data.draw(SEEDS))
    count = data.draw(st.integers(1, min(100, math.comb(documents, corpus.per_query))))
    drawn = list(new_combinations(corpus, count, corpus.rng("queries")))
    assert len(drawn) == len({frozenset(numbers) for numbers in drawn}) == count
    assert all(len(set(numbers)) == corpus.per_query for numbers in drawn)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="only 3"):
        Corpus(3, 1, 4)
    with pytest.raises(ConfigError, match="make fewer than 11 combinations"):
        next(new_combinations(Corpus(5, 1, 3), 11, Corpus().rng("queries")))


def test_times_of_a_request():
    request = Request(since=1.0)
    assert request.first_token_ms(now=1.5) == 500
    request.tokens = [1.25, 1.5, 2.0]
    assert request.first_token_ms() == 250
    assert request.gaps_ms() == [250, 500]
    assert request.gaps_ms(begin=1.5) == [500]


def test_percentiles_of_nothing_are_none():
    assert percentiles("ttft", [1.0, 2.0, 3.0], (50,)) == {"ttft_p50_ms": 2.0}
    assert percentiles("ttft", [], (50,)) == {"ttft_p50_ms": None}


def test_plain_and_unfinished_requests_hit_nothing():
    found, missed = {"status": "cached"}, {"status": "prefilled"}
    reused = Request(0.0, is_finished=True, chunks=[found, missed])
    plain, unfinished = Request(0.0, is_finished=True), Request(0.0)
    assert hit_share([reused, plain, unfinished], per_query=2) == 0.25
    assert hit_share([unfinished], per_query=2) is None


def test_the_best_rate_is_the_highest_that_meets_the_objective():
    times = ((1, 10.0), (2, 30.0), (4, 20.0), (8, 90.0))
    rows = [{"engine": "plain", "ratio": None, "rate": rate, "ttft_p90_ms": ms} for rate, ms in times]
    assert best_rate(rows, "plain", 20.0) == 4
    assert best_rate(rows, "plain", 5.0) is None
