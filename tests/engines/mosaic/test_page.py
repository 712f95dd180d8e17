"""The page that draws requests: its file, and how a browser shows it."""

import base64
import hashlib
import json
import random
import re
from itertools import pairwise

import pytest

from kvmosaic.engines.mosaic import content_policy, file_page, live_page
from kvmosaic.engines.results import MAX_SPANS, Fallback, joined
from kvmosaic.store import MissReason
from tests.browser import browsing

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


def chunk(start, end, status="cached", tier="host", reason=None):
    return {"span": {"start": start, "end": end}, "status": status, "tier": tier, "reason": reason}


REQUEST = {
    "title": HOSTILE,
    "prompt_tokens": 1000,
    "cached_tokens": 0,
    "first_token_ms": 41.5,
    "full_first_token_ms": 300.0,
    "report": {
        "mode": "reuse",
        "recompute_ratio": 0.1,
        "prefix_tokens": 50,
        "reused_tokens": 540,
        "recomputed": [[100, 140], [380, 420]],
        "chunks": [
            chunk(100, 400, tier="device"),
            chunk(400, 600),
            chunk(610, 700, tier="prefix-cache"),
            chunk(700, 800, "filled", None, "missing"),
            chunk(800, 950, "prefilled", None, "slower"),
        ],
    },
    "texts": ["The ferry", HOSTILE],
}
STATS = {
    "counts": {
        "chunk_hits": {"device": 3, "host": 1},
        "chunk_misses": {"new": 1},
        "tokens": {"reused": 540, "recomputed": 60, "filled": 100},
    },
    "tiers": {"device": {"bytes": 2**30, "entries": 3}, "host": {"bytes": 2**20, "entries": 1, "budget": 2**21}},
    "prompt_tokens": 1000,
    "prefix_tokens": 60,
    "has_statistics": True,
}


def test_every_reason_is_explained():
    [text] = re.findall(r"const REASONS = (\{.*?\n\});", live_page(), re.DOTALL)
    explained = json.loads(text)
    assert {reason.value for reason in Fallback} | {"missing", "too-long"} <= set(explained)
    assert {reason.value for reason in MissReason} <= set(explained)


def test_the_policy_allows_the_pages_own_parts_and_nothing_else():
    for kind, content in re.findall(r"<(style|script)>(.*?)</\1>", live_page(), re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in content_policy()
    assert "unsafe" not in content_policy()
    assert " style=" not in live_page()  # the policy forbids it


def test_no_text_ends_the_script_that_it_is_in():
    page = file_page(HOSTILE, STATS, [REQUEST])
    assert page.count("</script>") == live_page().count("</script>")
    [data] = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(data) == {"title": HOSTILE, "stats": STATS, "requests": [REQUEST]}


def test_runs_of_positions():
    assert joined([]) == []
    assert joined([3]) == [[3, 4]]
    assert joined([0, 1, 2, 5, 7, 8]) == [[0, 3], [5, 6], [7, 9]]
    for _ in range(20):
        chosen = sorted(random.sample(range(500), random.randrange(1, 400)))
        assert [at for start, end in joined(chosen) for at in range(start, end)] == chosen


def test_there_are_never_more_runs_than_a_report_may_have():
    wide = [at * 10 for at in range(MAX_SPANS - 3)]
    narrow = [wide[-1] + 100 + at * 2 for at in range(500)]
    runs = joined(wide + narrow)
    assert len(runs) == MAX_SPANS
    assert runs[: len(wide)] == [[at, at + 1] for at in wide]  # only the narrowest gaps were closed
    assert runs[-1][1] == narrow[-1] + 1
    assert all(before[1] < after[0] for before, after in pairwise(runs))


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        browser.size(1240, 1000)
        yield browser


@pytest.fixture
def page(browser, tmp_path):
    (tmp_path / "page.html").write_text(file_page("a session", STATS, [REQUEST]))
    browser.open(f"file://{tmp_path / 'page.html'}")
    browser.wait_for("document.querySelectorAll('.row').length === 1")
    return browser


@pytest.mark.long
def test_tiles_are_as_wide_as_their_tokens(page):
    tiles = page.value(
        "[...document.querySelectorAll('.tile')].map(t => [t.className, t.getBoundingClientRect().width])"
    )
    assert [name.removeprefix("tile ") for name, _ in tiles] == [
        *("prefix", "fresh", "device", "host", "fresh", "prefix", "filled", "prefilled", "fresh"),
    ]
    widths = [width for _, width in tiles]
    tokens = [50, 50, 300, 200, 10, 90, 100, 150, 50]
    share = sum(widths) / sum(tokens)
    assert widths == pytest.approx([share * count for count in tokens], abs=3)


@pytest.mark.long
def test_recomputed_tokens_are_marked(page):
    images = page.value("[...document.querySelectorAll('button.tile')].map(t => t.style.backgroundImage)")
    assert [bool(image) for image in images] == [True, True, False, False, False]
    places = [[float(place) for place in re.findall(r"recomputed\) ([0-9.]+)%", image)] for image in images[:2]]
    assert places == [pytest.approx([0, 13.333, 93.333, 100]), pytest.approx([0, 10])]


@pytest.mark.long
def test_a_click_tells_the_reason_and_another_closes_it(page):
    page.value("document.querySelectorAll('button.tile')[4].click()")
    told = page.value("document.querySelector('dl').textContent")
    assert "Reuse was predicted to be slower" in told
    assert "150, at 800 to 950" in told
    page.value("document.querySelectorAll('button.tile')[0].click()")
    told = page.value("[...document.querySelectorAll('dl')].map(list => list.textContent)")
    assert len(told) == 1
    assert "60 tokens (20 %)" in told[0]
    assert "The ferry" in told[0]
    page.value("document.querySelectorAll('button.tile')[0].click()")
    assert page.value("document.querySelectorAll('dl').length") == 0


@pytest.mark.long
def test_numbers_are_shown(page):
    def text(place):
        return page.value(f"document.getElementById('{place}').innerText")

    assert "80 %" in text("hits")
    assert "540" in text("tokens")
    assert "(54 %)" in text("tokens")
    assert "42 ms" in text("first")
    assert "300 ms" in text("first")
    assert "1.0 GiB" in text("tiers")
    assert "1.0 MiB of 2.0 MiB" in text("tiers")


def plain(cached, ms, **report):
    """A request without chunks of ours, of which vLLM's prefix cache had ``cached`` of 1,000 tokens."""
    report = {"mode": "plain", "fallback_reason": None, **report}
    return {"prompt_tokens": 1000, "cached_tokens": cached, "first_token_ms": ms, "report": report}


@pytest.mark.long
def test_requests_that_the_prefix_cache_answered_are_apart(browser, tmp_path):
    """Also those whose documents it had, which have the mode ``reuse`` although nothing of ours was reused."""
    held = [chunk(100, 900, tier="prefix-cache")]
    known = plain(950, 22.0, mode="reuse", prefix_tokens=950, reused_tokens=0, chunks=held)
    missing = [chunk(100, 900, "prefilled", None, "missing")]
    new = plain(16, 500.0, fallback_reason="not-stored", chunks=missing)
    requests = [known, new, plain(900, 24.0), plain(0, 700.0), REQUEST]
    (tmp_path / "page.html").write_text(file_page("a session", STATS, requests))
    browser.open(f"file://{tmp_path / 'page.html'}")
    browser.wait_for("document.querySelectorAll('.row').length === 5")
    told = browser.value("[...document.querySelectorAll('#first .three > div')].map(each => each.innerText)")
    assert [each.split("\n") for each in told] == [
        ["42 ms", "with reuse, median of 1"],
        ["500 ms", "without, median of 3"],
        ["23 ms", "prefix cache, median of 2"],
    ]
    rows = browser.value("[...document.querySelectorAll('.meta')].map(each => each.innerText)")
    assert "prefix cache" in rows[0]
    assert "95 % in the prefix cache" in rows[0]
    assert "not stored yet" in rows[1]
    assert "not-stored" not in rows[1]
    assert "1.6 % in the prefix cache" in rows[1]
    assert "prefix cache" not in rows[3].lower()


@pytest.mark.long
@pytest.mark.parametrize(("probed", "words"), [(True, "by a probe"), (False, "without a probe"), (None, None)])
def test_a_click_on_the_line_tells_how_tokens_were_chosen(browser, tmp_path, probed, words):
    report = {**REQUEST["report"], "policy": "composite", "probed": probed}
    (tmp_path / "page.html").write_text(file_page("a session", STATS, [{**REQUEST, "report": report}]))
    browser.open(f"file://{tmp_path / 'page.html'}")
    browser.wait_for("document.querySelectorAll('.row').length === 1")
    browser.value("document.querySelector('.meta').click()")
    told = browser.value("document.querySelector('dl').textContent")
    assert "composite" in told
    assert ("tokens chosen" in told) is (words is not None)
    assert words is None or words in told


@pytest.mark.long
def test_texts_stay_texts(page):
    page.value("document.querySelectorAll('button.tile')[1].click()")
    assert page.value("document.querySelector('dl').textContent.includes('<img src=x')")
    assert page.value("window.broken === undefined && !document.querySelector('img')")
    assert page.problems == []


@pytest.mark.long
@pytest.mark.parametrize("width", [400, 1240])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes_and_on_small_screens(page, width, scheme, tmp_path):
    page.scheme(scheme)
    page.size(width, 1000)
    colours = page.value(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(colour => colour.match(/[0-9]+/g).slice(0, 3).map(Number))"
    )
    luminance = [sum(channel * part for channel, part in zip(c, (0.2, 0.7, 0.1), strict=True)) for c in colours]
    assert abs(luminance[0] - luminance[1]) > 150
    assert (luminance[1] > 128) is (scheme == "light")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(tmp_path / "page.png")  # for people; pytest keeps it for a while
    page.size(1240, 1000)
