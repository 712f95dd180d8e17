"""Requests from their arrival to their end under vLLM's own scheduler, with anything that may happen on the way."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvmosaic.core.key import content_hash
from kvmosaic.engines.vllm import shape as shapes
from kvmosaic.engines.vllm.messages import Line
from tests.engines.vllm.scheduler_side.fakes import BLOCK, FIRST, SEGMENT, STEP, SYSTEM, make_request, text
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests
from tests.engines.vllm.scheduler_side.simulation import Simulation

DOCUMENTS = [text(number, length) for number, length in enumerate((40, 25, 16, 90, 33), start=1)]
SYSTEMS = [text(90, 20), text(90, 64), text(91, 5), []]
BLENDS = [(0.0, "composite"), (0.3, "composite"), (0.3, "sink-link"), (1.0, "composite")]
PLAIN = text(90, 400)
"""Begins as system prompts do."""


@pytest.fixture(autouse=True, scope="module")
def small_segments():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SEGMENT_TOKENS", SEGMENT)
        yield


def chunked(name, system=SYSTEM, documents=(FIRST,), question=10, answer=4, ratio=0.0, policy="composite", **more):
    params = {"report": True, "recompute_ratio": ratio, "policy": policy}
    return make_request(
        name, system, *documents, text(95, question), sampling={"max_tokens": answer}, **params, **more
    )


def plain(name, tokens, answer=4):
    return make_request(name, tokens, sampling={"max_tokens": answer}, report=True)


# --- one thing at a time


def store(engine, *documents):
    """Documents that the workers have and report."""
    for document in documents:
        engine.workers.put(content_hash(document, engine.ours._planner._sink), "host")
    engine.step()


def test_requests_with_the_same_prompt_in_one_step_are_loaded_once_and_share_blocks():
    engine = Simulation()
    store(engine, *DOCUMENTS)
    for name in "ab":
        engine.add(chunked(name, documents=DOCUMENTS[:2], question=1))
    loads = engine.step().kv_connector_metadata.loads
    # The second finds the first one's blocks in vLLM's prefix cache before they are written.
    assert [(load.request_id, load.start) for load in loads] == [("a", 0), ("b", 80)]
    engine.finish()
    engine.check_that_nothing_is_left()
    assert [engine.reports[name]["prefix_tokens"] for name in "ab"] == [0, 80]


def test_a_request_behind_blocks_that_a_plain_one_writes_in_the_same_step():
    engine = Simulation()
    store(engine, *DOCUMENTS)
    engine.add(plain("plain", PLAIN[:60]))
    engine.add(chunked("chunked", PLAIN[:50], DOCUMENTS[:1]))
    [load] = engine.step().kv_connector_metadata.loads
    assert (load.start, load.shared_until) == (0, 48)
    engine.finish()
    engine.check_that_nothing_is_left()


def test_preempted_requests_are_loaded_again():
    engine = Simulation(blocks=24)
    store(engine, *DOCUMENTS)
    for number in range(4):
        engine.add(chunked(str(number), text(60 + number, 20), DOCUMENTS[:2], answer=90))
    engine.finish()
    engine.check_that_nothing_is_left()
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert engine.workers.loads > 4
    assert engine.ours.stats.data["counts"] == {}  # vLLM took them


def test_long_blends_come_in_slices_while_another_decodes():
    engine = Simulation(miss_policy="fill-first")
    store(engine, *DOCUMENTS)
    engine.add(plain("other", text(7, 30), 60))
    engine.step()
    engine.add(chunked("long", documents=DOCUMENTS, ratio=1.0))
    begun = engine.step()
    work = begun.kv_connector_metadata
    assert (work.loads[0].is_sliced, work.slice_tokens) == (True, 37)  # the other's token is also computed
    assert set(begun.num_scheduled_tokens) == {"other"}
    steps = 1
    while "long" not in engine.step().num_scheduled_tokens:
        steps += 1
    assert steps >= (20 + 204) // 64
    engine.finish()
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_between_slices_leaves_nothing(steps):
    engine = Simulation(miss_policy="fill-first")
    store(engine, *DOCUMENTS)
    engine.add(plain("other", text(7, 30), 60))
    engine.step()
    engine.add(chunked("long", documents=DOCUMENTS, ratio=1.0))
    for _ in range(steps):
        engine.step()
    engine.abort("long")
    engine.add(chunked("next", documents=DOCUMENTS, ratio=1.0))
    engine.finish()
    engine.check_that_nothing_is_left()
    assert engine.reports["next"]["mode"] == "reuse"


def test_caches_are_reset_while_a_long_chunk_is_filled_in_slices():
    """vLLM does so when it is paused with ``keep``."""
    engine, document = Simulation(blocks=200), text(5, 500)
    engine.add(chunked("request", documents=[document], answer=60))
    for _ in range(14):
        engine.step()
    assert engine.ours._backlog._begun is not None
    assert engine.vllm.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert list(engine.workers.store) == [content_hash(document, engine.ours._planner._sink)]
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("window", [None, 20])
def test_exact_prefixes_come_back_after_the_prefix_cache_forgot_them(window):
    engine = Simulation(prefix_blocks=True, window=window)
    for name, tokens in (("a", PLAIN[:300]), ("b", [*PLAIN[:150], *text(7, 20)]), ("c", PLAIN[:300])):
        engine.vllm.reset_prefix_cache()
        engine.add(plain(name, tokens))
        engine.finish()
    assert engine.workers.saves > 0
    assert engine.workers.prefix_loads == 2
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("window", [None, 20])
def test_a_prefix_behind_blocks_that_a_request_with_chunks_brings_in_the_same_step(window):
    """The part that the store turns out not to have is computed, and sees all text before it."""
    engine = Simulation(prefix_blocks=True, window=window)
    engine.add(plain("before", PLAIN[:300]))
    engine.finish()
    engine.vllm.reset_prefix_cache()
    store(engine, *DOCUMENTS)
    engine.add(chunked("chunked", PLAIN[:64], DOCUMENTS[:1]))
    engine.add(plain("plain", PLAIN[:200]))
    engine.workers.put(prefix_digests(PLAIN)[1], None)  # the scheduler does not know it yet
    work = engine.step().kv_connector_metadata
    assert [load.request_id for load in (*work.loads, *work.prefix_loads)] == ["chunked", "plain"]
    engine.finish()
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("length", [140, 150, 200, 300])
def test_prompts_that_leave_a_loaded_prefix_anywhere(length):
    """Layers with a window have no KV of the beginnings of loaded segments."""
    engine = Simulation(prefix_blocks=True, window=20)
    engine.add(plain("before", PLAIN[:300]))
    engine.finish()
    engine.vllm.reset_prefix_cache()
    engine.add(plain("loaded", PLAIN[:300]))
    engine.finish()
    assert engine.workers.prefix_loads == 1
    engine.add(plain("leaves", [*PLAIN[:length], *text(8, 9)]))
    engine.finish()
    engine.add(plain("again", PLAIN[:300]))
    engine.finish()
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("window", [None, 20])
def test_a_prefix_behind_a_block_that_another_request_completes_in_the_same_step(window):
    """The load begins before that block. The other request has computed the block's first tokens and still reads
    them."""
    engine = Simulation(prefix_blocks=True, window=window)
    engine.add(plain("before", PLAIN[:200]))
    engine.finish()
    engine.vllm.reset_prefix_cache()
    engine.add(plain("other", text(7, 50)))
    engine.add(plain("half", [*PLAIN[:150], *text(8, 9)]))
    first = engine.step()
    assert first.num_scheduled_tokens == {"other": 50, "half": 14}
    engine.add(plain("behind", PLAIN[:200]))
    second = engine.step()
    assert second.num_scheduled_tokens["half"] == 17
    assert [(load.request_id, load.start) for load in second.kv_connector_metadata.prefix_loads] == [("behind", 128)]
    engine.finish()
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("kept", [144, 160])
def test_a_prompt_finds_the_beginning_of_a_chunk_of_which_windows_keep_the_end(kept, is_stored):
    """The rest is placed. If the store lost it, the whole chunk is computed again."""
    engine, system = Simulation(window=20), text(90, 64)
    documents = [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[3]]  # the last one is at 129 .. 218
    store(engine, *documents)
    engine.add(chunked("first", system, documents, answer=1))
    [load] = engine.step().kv_connector_metadata.loads
    engine.finish()
    engine.pool.evict_blocks(set(load.blocks[0][kept // BLOCK :]))
    engine.add(chunked("second", system, documents, answer=1))
    if not is_stored:
        engine.workers.put(content_hash(DOCUMENTS[3], engine.ours._planner._sink), None)
    [load] = engine.step().kv_connector_metadata.loads
    assert load.start == kept
    engine.finish()
    engine.check_that_nothing_is_left()


def test_a_request_that_is_served_plainly_for_its_cost_goes_on_like_any_other():
    engine = Simulation()
    engine.add(chunked("first", documents=DOCUMENTS[:2], answer=20))
    engine.finish()
    assert (engine.reports["first"]["mode"], engine.reports["first"]["fallback_reason"]) == ("plain", "not-stored")
    assert len(engine.workers.store) == 2  # filled in the background
    engine.vllm.reset_prefix_cache()
    engine.add(chunked("second", documents=DOCUMENTS[:2]))
    engine.finish()
    assert engine.reports["second"]["reused_tokens"] == 65
    engine.check_that_nothing_is_left()


def test_chunks_that_are_too_short_to_be_stored_are_text_of_their_prompts():
    engine = Simulation(min_chunk_tokens=20)
    engine.add(chunked("first", documents=[text(30, 19), text(31, 20)]))
    engine.finish()
    [chunk] = engine.reports["first"]["chunks"]
    assert chunk["span"]["end"] - chunk["span"]["start"] == 20


@pytest.mark.parametrize("length", [24, 600])
def test_missing_chunks_are_filled_while_another_decodes_within_half_a_step(length):
    """Long chunks are filled in slices, and keep their blocks from one step to the next."""
    engine = Simulation(blocks=120)
    documents = [text(30 + number, length) for number in range(2)]
    engine.add(chunked("first", documents=documents, answer=2))
    while "first" not in engine.reports:
        engine.step()
    engine.add(plain("other", text(7, 30), 200))
    engine.step()
    before = engine.vllm.requests["other"].num_output_tokens
    steps = 0
    while len(engine.workers.store) < 2:
        work = engine.step().kv_connector_metadata
        computed = sum(len(fill.context) + sum(len(tokens) for _, tokens in fill.chunks) for fill in work.fills)
        assert computed + len(work.fill_slice.tokens if work.fill_slice else ()) <= STEP // 2
        steps += 1
    assert engine.vllm.requests["other"].num_output_tokens == before + steps  # a token in every one of them
    assert (engine.workers.fill_slices > 0) is (length == 600)
    engine.finish()
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("end", ["answered", "aborted"])
def test_blocks_of_a_chunk_that_is_being_filled_come_back_with_the_last_request(end):
    """There may be no further step."""
    engine = Simulation(blocks=120)
    engine.add(chunked("first", documents=[text(30, 600)], answer=4 if end == "answered" else 50))
    while engine.workers.fill_slices < 2:
        engine.step()
    if end == "aborted":
        engine.abort("first")
    while engine.vllm.has_unfinished_requests():
        engine.step()
    assert not engine.workers.store
    assert engine.vllm.reset_prefix_cache(reset_connector=True)
    engine.finish()
    engine.check_that_nothing_is_left()


# --- anything at any time


class Lives(RuleBasedStateMachine):
    """Random requests, aborts, evictions and steps in an engine with few blocks."""

    @initialize(
        blocks=st.integers(26, 70),
        ranks=st.integers(1, 2),
        is_async=st.booleans(),
        window=st.sampled_from([None, None, 20]),
        policy=st.sampled_from(["background", "fill-first", "never"]),
        prefixes=st.booleans(),
        place=st.sampled_from([{}, {"disk_path": "/nowhere"}, {"remote": "valkey://nowhere:6379/0"}]),
        seed=st.integers(0, 100),
    )
    def start(self, blocks, ranks, is_async, window, policy, prefixes, place, seed):
        self.engine = Simulation(
            blocks=blocks,
            ranks=ranks,
            is_async=is_async,
            window=window,
            miss_policy=policy,
            prefix_blocks=prefixes,
            seed=seed,
            **place,
        )
        self.count = 0
        for number, document in enumerate(DOCUMENTS):
            tier = "disk" if number == seed % 7 else "host"
            self.engine.workers.put(content_hash(document, self.engine.ours._planner._sink), tier)
        self.engine.step()

    def name(self):
        self.count += 1
        return str(self.count)

    @rule(
        prompt=st.sampled_from([(1, (0, 1)), (1, (0, 1, 3)), (0, (3, 1)), (2, (2,)), (3, (0, 4))]),
        question=st.sampled_from([2, 30]),
        answer=st.sampled_from([1, 3, 40]),
        blends=st.lists(st.sampled_from(BLENDS), min_size=1, max_size=3),
        salt=st.sampled_from([None, None, None, "mine"]),
    )
    def add_chunked(self, prompt, question, answer, blends, salt):
        """There are few prompts, so that requests find each other's blocks."""
        system, documents = SYSTEMS[prompt[0]], [DOCUMENTS[number] for number in prompt[1]]
        for blend in blends:
            self.engine.add(chunked(self.name(), system, documents, question, answer, *blend, cache_salt=salt))

    @rule(
        lengths=st.lists(st.sampled_from([20, 70, 135, 150, 200, 330]), min_size=1, max_size=3),
        is_like_chunked=st.booleans(),
        answer=st.sampled_from([1, 3, 70]),
    )
    def add_plain(self, lengths, is_like_chunked, answer):
        """Some continue like requests with chunks."""
        for length in lengths:
            tokens = [*SYSTEMS[1], *DOCUMENTS[0], *DOCUMENTS[1]] if is_like_chunked else PLAIN[:length]
            self.engine.add(plain(self.name(), [*tokens, *text(80 + length % 2, 9)], answer))

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def run_until_idle(self):
        self.engine.finish()

    @rule(
        data=st.data(), kind=st.sampled_from(["abort", "abort", "drop", "demote", "cheap", "dear", "empty", "forget"])
    )
    def disturb(self, data, kind):
        """A request is aborted; the store drops or moves an entry; costs are measured; caches are emptied."""
        engine, workers = self.engine, self.engine.workers
        alive = [name for name, request in engine.vllm.requests.items() if not request.is_finished()]
        if kind == "abort" and alive:
            engine.abort(data.draw(st.sampled_from(alive)))
        elif kind in ("drop", "demote") and workers.store:
            digest = data.draw(st.sampled_from(sorted(workers.store)))
            workers.put(digest, None if kind == "drop" else "disk")
        elif kind in ("cheap", "dear"):
            workers.costs = {"blend": Line(0, 1.0), "remap": Line(0, 0.001 if kind == "cheap" else 3.0)}
        elif kind == "empty":
            engine.ours.empty_memory()
        elif kind == "forget":
            engine.vllm.reset_prefix_cache()

    def teardown(self):
        if hasattr(self, "engine"):
            try:
                self.engine.finish()
                self.engine.check_that_nothing_is_left()
            except AssertionError:
                print(*self.engine.history, sep="\n")
                raise


TestLives = Lives.TestCase
TestLives.settings = settings(
    deadline=None,
    max_examples=max(1, settings().max_examples // 3),  # each is long
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
