"""Real engines of different tensor-parallel sizes, which serve each other's documents from a shared pool."""

import time
from typing import Any

import pytest
import torch

from kvmosaic.engines.vllm.scheduler_side import patience
from kvmosaic.store.tiers.remote import open_remote_tier
from tests.engines.vllm.helpers import (
    PART,
    draw,
    forget,
    forget_fast_copies,
    greedy,
    join,
    report,
    set_patience,
    start,
    store,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_llama
from tests.store.remote_servers import Mooncake, Valkey

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024}
FILLED = [("filled", None)] * 5
FROM_POOL = [("cached", "remote")] * 5
OPENING, ANSWER = 280, 250
"""Number of tokens of a conversation's first prompt, and of the answer to it: together more than two segments."""


def pooled(url: str) -> dict[str, Any]:
    return {**SETTINGS, "remote": url, "per_head_storage": True, "remote_deadline_ms": 300_000, "prefix_blocks": True}


def ask_twice(llm: Any, documents: list[list[int]]) -> tuple[list[list[int]], list[tuple[str, str | None]]]:
    """Answers to two prompts that have the documents in different orders, and the status of each document in the
    first."""
    answers, fates = [], []
    for system, order in ((12, (0, 1, 2, 3, 4)), (13, (4, 2, 0, 1, 3))):
        ids, boundaries = join([[system] * 9, *[documents[i] for i in order], [7, 8, 9]])
        params = {"boundaries": boundaries, "report": True}
        [output] = llm.generate(
            {"prompt_token_ids": ids}, greedy(12, detokenize=False, params=params), use_tqdm=False
        )
        answers.append(list(output.outputs[0].token_ids))
        fates.append([(chunk["status"], chunk.get("tier")) for chunk in report(output)["chunks"]])
    return answers, fates[0]


def answers_left_alone(llm: Any, documents: list[list[int]]) -> list[list[int]]:
    """Answers of plain vLLM, which requests also get if a load fails, because they are then computed as a whole."""
    answers = []
    for system, order in ((12, (0, 1, 2, 3, 4)), (13, (4, 2, 0, 1, 3))):
        ids, _ = join([[system] * 9, *[documents[i] for i in order], [7, 8, 9]])
        assert llm.reset_prefix_cache()
        params = greedy(12, detokenize=False, params={"chunk_cache": False})
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    return answers


def check(engine: EngineApart, documents: list[list[int]], wanted: Any) -> None:
    """Check the engine's answers and the status of the documents. On failure, everything that may explain it is
    shown. On two busy cores a call to the pool may time out. Then the documents are filled, the answers must still be
    right, and the pool is asked again."""
    found = engine.call(ask_twice, documents)
    for _ in range(2):
        if wanted[1] == FROM_POOL and found == (wanted[0], FILLED):
            engine.call(on_ranks, forget_memory)
            engine.call(forget)
            engine.call(settle)
            found = engine.call(ask_twice, documents)
    if found != wanted:
        plain = engine.call(answers_left_alone, documents)
        pytest.fail(f"{found}, wanted {wanted}; plain vLLM says {plain}; {engine.said()}")


def talk(llm: Any, tokens: list[int], count: int) -> tuple[list[int], int]:
    """An answer, and the number of the prompt's cached tokens."""
    [output] = llm.generate({"prompt_token_ids": tokens}, greedy(count, detokenize=False), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def converse(llm: Any, opening: list[int]) -> list[int]:
    """A conversation, and its next turn."""
    return [*opening, *talk(llm, opening, ANSWER)[0], 5, 6, 7]


def wait_for_pool(worker: Any) -> bool:
    """Wait until this rank can use the pool, which it does not use for a while after a call that took too long.
    Returns whether it can. Two ranks that wait for each other on two cores may keep everything else from running for
    a minute."""
    deadline = time.monotonic() + 180
    while not store()._stack.tiers[-1].is_up and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(store()._stack.tiers[-1].is_up)


def be_patient(llm: Any) -> None:
    """Let requests wait for the pool without a limit. On a busy machine, two ranks may need more than half a minute
    to fetch anything, and the request would be served plainly, with other answers. For an engine in a separate
    process."""
    patience.MOST_SECONDS = patience.LEAST_SECONDS = 600


def settle(llm: Any) -> None:
    """Wait until all ranks have reported their entries and use the pool, before any request depends on that."""
    llm.generate({"prompt_token_ids": draw(5)}, greedy(2, detokenize=False), use_tqdm=False)
    assert all(llm.collective_rpc(wait_for_pool))


def flush(worker: Any) -> tuple[str, int]:
    """Write everything to the pool. Returns this rank's entries and the number of failed writes."""
    store().flush()
    return str(worker_side().ranks.share.heads), store().get_stats()["write_errors"]


def forget_memory(worker: Any) -> None:
    """Empty a rank's memory, so that it only has the entries in the pool."""
    forget_fast_copies()


def on_ranks(llm: Any, function: Any) -> list[Any]:
    return llm.collective_rpc(function)


class Case:
    """Two sets of documents, an opening for each, and the answers of an engine without a pool. An engine of two ranks
    gives the same answers (``test_tensor_parallel.py``)."""

    def __init__(self, model: str) -> None:
        lengths = ((20, 37, 52, 64, 70), (23, 31, 45, 58, 69))
        self.sets = [[draw(length) for length in each] for each in lengths]
        self.openings = [draw(OPENING) for _ in self.sets]
        llm = start(model, **SETTINGS)
        self.answers, self.turns = [], []
        for documents, opening in zip(self.sets, self.openings, strict=True):
            answers, fate = ask_twice(llm, documents)
            assert fate == FILLED
            self.answers.append(answers)
            conversation = converse(llm, opening)
            assert llm.reset_prefix_cache()
            turn, cached = talk(llm, conversation, 8)
            assert cached == 0
            self.turns.append(turn)
        assert self.answers[0] != self.answers[1]  # so that equal ones mean something
        assert self.turns[0] != self.turns[1]


@pytest.fixture(scope="module")
def case(tiny_llama):
    return Case(tiny_llama)


@pytest.mark.parametrize("kind", [Valkey, Mooncake], ids=lambda kind: kind.kind)
def test_each_size_serves_what_the_other_computed(tmp_path, tiny_llama, case, kind, monkeypatch):
    """KV is computed by a prefill and by decoding at one size, and served at the other."""
    pool = kind(tmp_path)
    try:
        with EngineApart(tiny_llama, ranks=2, **pooled(pool.url)) as two:
            two.call(be_patient)
            two.call(settle)
            check(two, case.sets[0], (case.answers[0], FILLED))
            conversation = two.call(converse, case.openings[0])
            assert two.call(on_ranks, flush) == [("0-1of4L0-2", 0), ("2-3of4L0-2", 0)]

            set_patience(monkeypatch, 600)
            one = start(tiny_llama, **pooled(pool.url))  # finds all entries when it starts
            settle(one)
            assert ask_twice(one, case.sets[0]) == (case.answers[0], FROM_POOL), two.said()
            assert talk(one, conversation, 8) == (case.turns[0], 2 * PART)
            assert ask_twice(one, case.sets[1]) == (case.answers[1], FILLED)
            conversation = converse(one, case.openings[1])
            assert one.collective_rpc(flush) == [("0-3of4L0-2", 0)]

            # This engine does not know these.
            two.call(settle)
            check(two, case.sets[1], (case.answers[1], FROM_POOL))
            assert two.call(talk, conversation, 8) == (case.turns[1], 2 * PART)
    finally:
        pool.kill()


def test_more_ranks_than_heads(tmp_path):
    """One of two ranks with the same head writes it, and both read it."""
    model = write_tiny_llama(tmp_path / "model", kv_heads=1)
    documents = [draw(length) for length in (20, 37, 52, 64, 70)]
    pool = Valkey(tmp_path)
    try:
        with EngineApart(model, ranks=2, **pooled(pool.url)) as two:
            two.call(be_patient)
            two.call(settle)
            first, fate = two.call(ask_twice, documents)
            assert fate == FILLED
            assert two.call(on_ranks, flush) == [("0-0of1L0-2", 0)] * 2
            tier = open_remote_tier(pool.url, 10)
            assert {info.key.heads for info in tier.scan()} == {"0-0of1L0-2"}
            tier.close()
            two.call(on_ranks, forget_memory)
            two.call(forget)  # with its step the scheduler learns of that
            two.call(settle)
            check(two, documents, (first, FROM_POOL))
    finally:
        pool.kill()
