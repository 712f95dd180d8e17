"""Time is linear and memory is bounded, for any prompts that clients send."""

import random
import time
import tracemalloc

import numpy as np
import pytest

from kvmosaic.core.discovery import Discovery
from kvmosaic.core.discovery import plans as plans_module
from kvmosaic.core.discovery import runs as runs_module
from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span

MARKER = 3


def text(length):
    return np.random.randint(10, 60_000, length).tolist()


HEAD = list(range(100, 140))


def alike(length):
    """Many places where each of several known runs may begin, but none does."""
    return [token for _ in range(length // 40) for token in HEAD]


PERIOD = [11, 12, 13, 14, 15]
KNOWN = list(range(1000, 81_000))
HOSTILE = {
    "new": text,
    "one token": lambda length: [random.randrange(10, 99), *[5000] * length],
    "periodic": lambda length: [random.randrange(10, 99), *PERIOD * (length // 5)],
    "markers": lambda length: [MARKER, 50] * (length // 2),
    "runs and markers": lambda length: [token for _ in range(length // 80) for token in (*KNOWN[:79], MARKER)],
    "rotated": lambda length: [*KNOWN[(cut := random.randrange(length)) : length], *KNOWN[:cut]],
    "alike": alike,
    "small pieces": lambda length: [
        token for at in random.choices(range(0, 4000, 20), k=length // 20) for token in KNOWN[at : at + 20]
    ],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_time_is_linear(kind):
    def seconds(length):
        discovery = Discovery([MARKER], 10**9)
        discovery.find(text(80_000))  # as long as its tables will be
        for _ in range(runs_module.MAX_ALIKE):
            tail = text(4900)
            for _ in range(2):
                discovery.find([*text(20), *HEAD, *tail, 5])
        times = []
        for _ in range(7):
            prompt = HOSTILE[kind](length)
            begin = time.process_time()
            discovery.find(prompt)
            times.append(time.process_time() - begin)
        return sorted(times)[2]

    short, long = seconds(5_000), seconds(80_000)
    assert long < 16 * short * 3 + 0.02
    assert short < 0.05  # ten times what it takes


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(runs_module, "MAX_RUNS", 500)
    monkeypatch.setattr(plans_module, "MAX_PLANS", 500)
    discovery = Discovery([MARKER], 10**9)
    discovery.find(text(5000))
    documents = [text(100) for _ in range(3000)]
    tracemalloc.start()
    for turn in range(60):
        for salt in ("mine", "yours"):
            discovery.find([*text(20), *(t for each in random.sample(documents, 40) for t in each), 5], (), salt)
        if turn == 30:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(discovery._runs) == 500
    assert len(discovery._plans) <= 500
    assert sum(map(len, discovery._runs._anchored.values())) == 500
    assert grown < 200_000


def test_runs_with_the_same_anchor_are_few():
    discovery, head = Discovery([], 10**9), text(60)
    for _ in range(30):
        tail = text(80)
        for _ in range(2):
            discovery.find([*text(20), *head, *tail, *text(20)])
    assert max(map(len, discovery._runs._anchored.values())) <= runs_module.MAX_ALIKE


def test_runs_that_may_begin_everywhere_are_not_tried_everywhere(monkeypatch):
    discovery = Discovery([], 10**9)
    for _ in range(runs_module.MAX_ALIKE):
        tail = text(500)
        for _ in range(2):
            discovery.find([*text(20), *HEAD, *tail, 5])
    counted = []
    digest = Segments.digest
    monkeypatch.setattr(Segments, "digest", lambda *given: counted.append(given) or digest(*given))
    discovery.find(alike(20_000))
    assert 8 < len(counted) < 20_000 / 40


def test_bytes_of_a_run_and_of_a_plan():
    discovery = Discovery([], 0)
    discovery.find(text(10_000))  # as long as its tables will be
    tracemalloc.start()
    runs, plans = runs_module.Runs(), plans_module.Plans()
    empty = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        prompt = text(10_000)
        cut = discovery._cutter.cut(np.array(prompt), ())
        segments = discovery._hasher.hash(np.array(prompt), cut, None)
        places = [runs.add(segments, begin, begin + 8) for begin in range(0, len(segments) - 9, 9)]
        for place in places:
            place.remember([place._replace(start=place.start + more) for more in range(2 * runs_module.MAX_PIECES)])
        plans.add(segments, 0, [Span(place.start, place.end) for place in places])
        del segments, cut, places, prompt
    used = tracemalloc.get_traced_memory()[0] - empty
    tracemalloc.stop()
    assert used / len(runs) < 640 + 256


def test_tables_take_the_memory_they_are_said_to():
    history = Discovery([], 0)._history
    arrays = [value for value in vars(history).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 14 * 2**20
