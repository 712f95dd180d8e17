"""Real engines of different pipeline-parallel sizes, which serve each other's documents from a shared pool."""

from typing import Any

import pytest
import torch

from tests.engines.vllm.helpers import draw, set_patience, start
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_shared_pool import (
    FILLED,
    FROM_POOL,
    SETTINGS,
    ask_twice,
    be_patient,
    check,
    flush,
    on_ranks,
    settle,
)
from tests.engines.vllm.tiny import write_tiny_llama
from tests.store.remote_servers import Valkey

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]

LAYERS = 4


def pooled(url: str) -> dict[str, Any]:
    """Settings that store half of the layers together, which are those of a stage."""
    return {
        **SETTINGS,
        "remote": url,
        "per_head_storage": True,
        "remote_layers": LAYERS // 2,
        "remote_deadline_ms": 300_000,
    }


class Case:
    """Sets of documents, and the answers of an engine without a pool."""

    def __init__(self, model: str, count: int) -> None:
        self.sets = [[draw(length) for length in (20, 37, 52, 64, 70)] for _ in range(count)]
        llm = start(model, **SETTINGS)
        self.answers = []
        for documents in self.sets:
            answers, fate = ask_twice(llm, documents)
            assert fate == FILLED
            self.answers.append(answers)


@pytest.fixture
def model(tmp_path):
    return write_tiny_llama(tmp_path / "four", num_hidden_layers=LAYERS)


@pytest.fixture
def pool(tmp_path):
    server = Valkey(tmp_path)
    yield server
    server.kill()


def test_one_stage_and_two_serve_what_the_other_computed(model, pool, monkeypatch):
    case = Case(model, 2)
    without = {
        key: value for key, value in pooled(pool.url).items() if key not in ("per_head_storage", "remote_layers")
    }
    with EngineApart(model, stages=2, **without) as two:  # stages need no setting
        two.call(be_patient)
        two.call(settle)
        check(two, case.sets[0], (case.answers[0], FILLED))
        assert two.call(on_ranks, flush) == [("0-3of4L0-1", 0), ("0-3of4L2-3", 0)], two.said()

        set_patience(monkeypatch, 600)
        one = start(model, **pooled(pool.url))
        settle(one)
        assert ask_twice(one, case.sets[0]) == (case.answers[0], FROM_POOL), two.said()
        assert ask_twice(one, case.sets[1]) == (case.answers[1], FILLED)
        assert one.collective_rpc(flush) == [("0-3of4L0-3", 0)]

        two.call(settle)
        check(two, case.sets[1], (case.answers[1], FROM_POOL))


@pytest.mark.long
def test_two_stages_and_two_ranks_serve_what_the_other_computed(model, pool):
    case = Case(model, 2)
    for computed, served, sizes in ((0, None, {"stages": 2}), (1, 0, {"ranks": 2}), (None, 1, {"stages": 2})):
        with EngineApart(model, **sizes, **pooled(pool.url)) as engine:
            engine.call(be_patient)
            engine.call(settle)
            if served is not None:
                check(engine, case.sets[served], (case.answers[served], FROM_POOL))
            if computed is not None:
                check(engine, case.sets[computed], (case.answers[computed], FILLED))
                assert {errors for _, errors in engine.call(on_ranks, flush)} == {0}, engine.said()
