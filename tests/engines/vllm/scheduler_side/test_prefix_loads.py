"""Exact prefix segments that are loaded from the store for plain requests."""

import time

import pytest
import torch
from vllm import PoolingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvmosaic.engines.vllm.compat.scheduling import Step
from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.scheduler_side.patience import UNMEASURED_SECONDS
from tests.engines.vllm.scheduler_side.fakes import BLOCK, FIRST, SEGMENT, Side, ask_about, make_request, text
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests

PROMPT = text(5, 3 * SEGMENT + 10)
REMOTE = {"remote": "valkey://nowhere:6379/0"}
DISK = {"disk_path": "/nowhere"}


def stored(count, *, tier="host", **settings):
    """A scheduler whose workers have the first segments of the prompt."""
    side = Side(prefix_blocks=True, **settings)
    side.report(dict.fromkeys(prefix_digests(PROMPT)[:count], tier))
    return side


def plain(name="plain", tokens=PROMPT, **arguments):
    return make_request(name, tokens, **arguments)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_what_the_store_has_is_brought(count):
    side = stored(count)
    request = side.add(plain())
    assert side.ask(request) == (count * SEGMENT, False)
    _, blocks = side.begin(request, more=10)
    loads = side.step().prefix_loads
    assert len(loads) == (count > 0)
    for load in loads:
        assert load.request_id == "plain"
        assert load.tokens == tuple(PROMPT[: count * SEGMENT])
        assert load.digests == tuple(prefix_digests(PROMPT)[:count])
        assert (load.segment_tokens, load.start, load.blocks) == (SEGMENT, 0, (tuple(blocks),))


def test_at_least_one_token_is_left_to_compute():
    side = stored(3)
    assert side.matched(side.add(plain(tokens=PROMPT[: 2 * SEGMENT]))) == SEGMENT
    assert side.matched(side.add(plain("more", PROMPT[: 2 * SEGMENT + 1]))) == 2 * SEGMENT


def test_a_segment_behind_a_gap_is_not_brought():
    side = stored(3)
    side.report({prefix_digests(PROMPT)[1]: None})
    assert side.matched(side.add(plain())) == SEGMENT


@pytest.mark.parametrize(
    ("local", "expected"), [(32, SEGMENT - 32), (SEGMENT, SEGMENT), (SEGMENT + 16, SEGMENT - 16), (2 * SEGMENT, 0)]
)
def test_only_what_follows_the_prefix_cache_is_brought(local, expected):
    side = stored(1 if local < SEGMENT else 2)
    request = side.add(plain())
    assert side.matched(request, local) == max(0, expected)
    side.begin(request, local, more=5)
    assert [(load.start, len(load.tokens)) for load in side.step().prefix_loads] == (
        [(local, local + expected)] if expected else []
    )


def test_the_same_segment_behind_another_is_another():
    side = stored(3)
    assert side.matched(side.add(plain(tokens=[*text(6, SEGMENT), *PROMPT[SEGMENT:]]))) == 0
    assert side.matched(side.add(plain("second", PROMPT[SEGMENT:]))) == 0


def test_without_the_setting_nothing_is_brought():
    side = Side()
    side.report(dict.fromkeys(prefix_digests(PROMPT), "host"))
    assert side.matched(side.add(plain())) == 0


IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="a", mm_position=PlaceholderRange(0, 4))


@pytest.mark.parametrize(
    "arguments",
    [
        {"fields": {"lora_request": LoRARequest("adapter", 1, "/adapter")}},
        {"fields": {"prompt_embeds": torch.zeros(len(PROMPT), 4)}},
        {"fields": {"mm_features": [IMAGE]}},
        {"cache_salt": "mine"},
        {"sampling": {"prompt_logprobs": 1}},
    ],
    ids=["lora", "embeddings", "image", "cache-salt", "prompt-logprobs"],
)
def test_prompts_that_their_tokens_do_not_tell_apart_get_nothing(arguments):
    side = stored(3)
    assert side.matched(side.add(plain(**arguments))) == 0


def test_pooling_requests_get_nothing():
    side = stored(3)
    request = plain()
    request.pooling_params = PoolingParams(task="embed")
    assert side.matched(side.add(request)) == 0


def test_requests_with_chunks_have_no_exact_segments():
    side = stored(3)
    request = side.add(ask_about(FIRST))
    side.store(FIRST)
    side.begin(request)
    work = side.step()
    assert work.loads
    assert not work.prefix_loads
    assert "request" not in side.scheduler.prefixes._requests


def test_a_request_that_falls_back_at_its_start_may_have_exact_segments():
    side = stored(3)
    assert side.matched(side.add(plain(policy="oracle"))) == 3 * SEGMENT


def test_after_a_failed_self_test_nothing_is_loaded_or_saved():
    side = stored(2)
    early = side.add(plain("early"))
    assert side.matched(early) == 2 * SEGMENT
    left = side.add(plain("left", text(6, 2 * SEGMENT)))
    _, blocks = side.begin(left, more=2 * SEGMENT)
    side.step(new=frozenset({"left"}), blocks={"left": blocks})
    left.num_computed_tokens = SEGMENT
    side.scheduler.finished(left)
    side.report(is_off=True)
    assert side.matched(early) == 0
    assert side.matched(side.add(plain("late"))) == 0
    side.give(early, 0, more=len(PROMPT))
    assert side.run("early", 1, 3 * SEGMENT).is_empty


def test_blocks_that_the_same_step_writes_are_brought_as_well():
    side = stored(2)
    request = side.add(plain())
    _, blocks = side.begin(request, 48, more=5)
    step = Step(
        scheduled={"writer": 32},
        computed={"writer": 0},
        new=frozenset({"writer", "plain"}),
        blocks={"writer": blocks[:2], "plain": blocks},
    )
    [load] = side.scheduler.take_work(step).prefix_loads
    assert load.start == 0


# --- slower tiers


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def test_segments_in_slower_tiers_are_fetched_once_and_waited_for():
    side = stored(2, tier="disk", shape={"ranks": 2})
    side.report({prefix_digests(PROMPT)[0]: "host"})
    request = side.add(plain())
    assert side.matched(request) is None
    assert side.matched(request) is None
    [fetch] = side.step().fetches
    assert (fetch.request_id, fetch.chunks) == ("plain", ((prefix_digests(PROMPT)[1], SEGMENT),))
    side.report(rank=0, fetched=["plain"])
    assert side.matched(request) is None
    side.report(rank=1, fetched=["plain"])
    assert side.matched(request) == 2 * SEGMENT
    assert not side.step().fetches


def test_before_all_ranks_have_told_what_they_have_plain_requests_wait(clock):
    side = Side(prefix_blocks=True, is_known=False)
    request = side.add(plain())
    assert side.matched(request) is None
    side.report()
    assert side.matched(request) == 0
    other = Side(prefix_blocks=True, is_known=False)
    request = other.add(plain())
    assert other.matched(request) is None
    clock.now += UNMEASURED_SECONDS
    assert other.matched(request) == 0


def test_patience_ends_and_all_is_computed(clock):
    side = stored(2, tier="disk")
    request = side.add(plain())
    clock.now += 500
    assert side.matched(request) is None
    clock.now += UNMEASURED_SECONDS - 0.1
    assert side.matched(request) is None
    clock.now += 0.1
    assert side.matched(request) == 0
    side.give(request, 0, more=64)
    assert side.step().released == ["plain"]


def test_a_plain_request_waits_as_long_as_a_prefill_of_its_segments_takes(clock):
    side = stored(2, tier="disk", shape={"step_tokens": 16})
    side.report(costs={"blend": Line(0, 0.1)})
    request = side.add(plain())
    assert side.matched(request) is None
    clock.now += 0.1 * 2 * SEGMENT - 0.1
    assert side.matched(request) is None
    clock.now += 0.1
    assert side.matched(request) == 0


def test_a_preempted_plain_request_asks_again(clock):
    side = stored(2, tier="disk")
    request = side.add(plain())
    assert side.matched(request) is None
    side.report(fetched=["plain"])
    assert side.begin(request)[0] == 2 * SEGMENT
    assert len(side.step().prefix_loads) == 1
    clock.now += 2 * UNMEASURED_SECONDS
    assert side.matched(request) is None
    assert len(side.step().fetches) == 1
    side.report(fetched=["plain"])
    assert side.begin(request)[0] == 2 * SEGMENT


def test_an_abort_while_a_plain_request_waits_releases():
    side = stored(2, tier="disk")
    request = side.add(plain())
    assert side.matched(request) is None
    side.scheduler.finished(request)
    assert side.step().released == ["plain"]
    assert side.is_forgotten(request)
    side.report(fetched=["plain"])


@pytest.mark.parametrize("place", [REMOTE, DISK], ids=["remote", "disk"])
def test_of_a_shared_pool_everything_is_asked_for(place):
    side = stored(1, **place)
    request = side.add(plain())
    assert side.matched(request) is None
    [fetch] = side.step().fetches
    assert [digest for digest, _ in fetch.chunks] == prefix_digests(PROMPT)[1:3]
    side.report({prefix_digests(PROMPT)[1]: "host"}, fetched=["plain"])
    assert side.matched(request) == 2 * SEGMENT


def test_a_busy_engine_asks_its_disk_once_it_has_company():
    side = stored(1, **DISK)
    side.run()
    assert side.matched(side.add(plain())) == SEGMENT
    side = stored(1, **DISK)
    side.report(has_company=True)
    side.run()
    assert side.matched(side.add(plain())) is None


def test_of_a_shared_pool_nothing_is_asked_for_that_the_prefix_cache_has():
    side = stored(0, **REMOTE)
    request = side.add(plain())
    assert side.matched(request, 2 * SEGMENT + 16) is None
    [fetch] = side.step().fetches
    assert [digest for digest, _ in fetch.chunks] == prefix_digests(PROMPT)[2:3]


def test_segments_are_multiples_of_blocks():
    assert SEGMENT % BLOCK == 0
