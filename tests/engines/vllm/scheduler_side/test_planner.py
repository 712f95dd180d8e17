"""Which requests have chunks, how these are planned, and why other requests are served plainly."""

import hashlib
import logging
import math

import pytest
import torch
from vllm import PoolingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvmosaic.core.prompt import Span
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.planner import Planner
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SINK,
    SYSTEM,
    Side,
    ask_about,
    digest_of,
    make_request,
    make_setup,
    make_shape,
    text,
)


def planned(request, shape=None, **settings):
    setup = make_setup(make_shape(**(shape or {})), **settings)
    params = RequestParameters.read(request.kv_transfer_params, setup.config.allowed_parameters)
    return Planner(setup.config, setup.parser, setup.sink, setup.shape, StoreMirror(1)).plan(request, params).outcome


def test_a_request_with_chunks():
    ours = planned(ask_about(FIRST, SECOND))
    assert isinstance(ours, ChunkRequest)
    assert ours.request_id == "request"
    assert ours.prompt.token_ids == (*SYSTEM, *FIRST, *SECOND, *QUESTION)
    assert ours.prompt.chunks == (Span(20, 60), Span(60, 100))
    assert ours.digests == (digest_of(FIRST), digest_of(SECOND))
    assert ours.context == SINK


def test_chunks_are_computed_after_the_system_prompt_where_that_is_set():
    ours = planned(ask_about(FIRST, SECOND), chunk_context="system")
    assert ours.context == tuple(SYSTEM)
    assert ours.digests == (digest_of(FIRST, SYSTEM), digest_of(SECOND, SYSTEM))


def test_ratio_and_policy_are_the_engines_unless_the_request_says_so():
    settings = {"recompute_ratio": 0.25, "policy": "random"}
    by_engine = planned(ask_about(FIRST), **settings)
    assert (by_engine.ratio, by_engine.policy) == (0.25, "random")
    own = planned(ask_about(FIRST, recompute_ratio=0, policy="sink-link(k=8)"), **settings)
    assert (own.ratio, own.policy) == (0.0, "sink-link(k=8)")


@pytest.mark.parametrize(
    "request_",
    [
        make_request("no boundaries", [*SYSTEM, *FIRST, *QUESTION]),
        ask_about(FIRST, chunk_cache=False),
        make_request("no chunk", SYSTEM, QUESTION),
        make_request("empty chunk", SYSTEM, [], QUESTION),
        make_request("others' parameters", SYSTEM, QUESTION, remote_host="elsewhere"),
    ],
    ids=["no-boundaries", "not-wanted", "no-chunk", "empty-chunk", "others-parameters"],
)
def test_a_request_without_chunks_is_no_fallback(request_):
    assert planned(request_) is None


def test_a_prompt_of_embeddings_alone_has_no_chunks():
    request = make_request("embedded", FIRST)
    request.prompt_token_ids = None
    assert planned(request) is None


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"chunk_cache": "yes"}, "chunk_cache"),
        ({"report": 1}, "report"),
        ({"recompute_ratio": 1.5}, "recompute_ratio"),
        ({"recompute_ratio": -0.1}, "recompute_ratio"),
        ({"recompute_ratio": "0.5"}, "recompute_ratio"),
        ({"recompute_ratio": True}, "recompute_ratio"),
        ({"recompute_ratio": math.nan}, "recompute_ratio"),
        ({"policy": 5}, "policy"),
        ({"policy": "oracle"}, "unknown policy 'oracle'"),
        ({"policy": "kv-deviation(layers=9)"}, "layer"),
        ({"boundaries": [(0, 20), (10, 70)]}, "order"),
        ({"boundaries": [(0, 70)]}, "question"),
        ({"boundaries": [(0, 20), (20, 60), (60, "70")]}, "boundaries"),
        ({"boundaries": "0-20"}, "boundaries"),
    ],
)
def test_wrong_parameters_are_said_in_one_line_and_cost_nothing_but_reuse(params, named, caplog):
    with caplog.at_level(logging.WARNING):
        assert planned(ask_about(FIRST, **params)) is Fallback.BAD_PARAMETERS
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("kvmosaic")]
    assert "request request" in line
    assert named in line
    assert "\n" not in line


def test_sets_that_shrink_are_not_planned_over_several_pipeline_stages(caplog):
    request = ask_about(FIRST, policy="kv-deviation(layers=1+2)", recompute_ratio=0.9)
    assert planned(request).policy == "kv-deviation(layers=1+2)"
    with caplog.at_level(logging.WARNING):
        assert planned(request, shape={"stages": 2}) is Fallback.BAD_PARAMETERS
    assert "pipeline_parallel_size=2" in caplog.text


def test_wrong_parameters_count_where_there_are_no_chunks():
    assert planned(make_request("wrong", SYSTEM, recompute_ratio=2)) is Fallback.BAD_PARAMETERS


IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="a", mm_position=PlaceholderRange(0, 4))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"fields": {"lora_request": LoRARequest("adapter", 1, "/adapter")}}, Fallback.LORA),
        ({"fields": {"prompt_embeds": torch.zeros(70, 4)}}, Fallback.PROMPT_EMBEDS),
        ({"fields": {"mm_features": [IMAGE]}}, Fallback.MULTIMODAL),
        ({"sampling": {"prompt_logprobs": 1}}, Fallback.EVERY_TOKEN_WANTED),
    ],
    ids=["lora", "embeddings", "image", "prompt-logprobs"],
)
def test_why_chunks_cannot_be_reused(arguments, reason):
    assert planned(ask_about(FIRST, **arguments)) is reason
    assert planned(make_request("no chunks", text(9, 70), **arguments)) is None


def test_pooling_wants_every_token():
    request = ask_about(FIRST)
    request.pooling_params = PoolingParams(task="embed")
    assert planned(request) is Fallback.EVERY_TOKEN_WANTED


@pytest.mark.parametrize(
    ("params", "length", "is_refused"),
    [
        ({"recompute_ratio": 0.5, "policy": "composite"}, 33, True),
        ({"recompute_ratio": 0.5, "policy": "composite"}, 32, False),  # entries keep all of it
        ({"recompute_ratio": 0.5, "policy": "sink-link"}, 33, False),  # sees nothing of its own chunk
        ({"recompute_ratio": 0.0, "policy": "composite"}, 33, False),
        ({"recompute_ratio": 1.0, "policy": "composite"}, 33, False),
    ],
)
def test_a_policy_that_looks_inside_chunks_of_which_windows_keep_only_the_end(params, length, is_refused):
    request = ask_about(text(1, 10), text(2, length), **params)
    assert (planned(request, {"window_tail": 32}) is Fallback.WINDOW) is is_refused
    assert isinstance(planned(request), ChunkRequest)


def test_requests_with_a_cache_salt_are_kept_apart():
    def digests(salt):
        return planned(ask_about(FIRST, SECOND, cache_salt=salt)).digests

    assert digests("mine") == digests("mine")
    assert len({digests(None), digests("mine"), digests("yours")}) == 3
    [first, _] = digests("mine")
    assert first == hashlib.sha256(b"mine" + digest_of(FIRST)).digest()[:16]


def test_a_fallback_is_counted_and_reported():
    side = Side()
    request = side.add(ask_about(FIRST, policy="oracle"))
    assert side.ask(request) == (0, False)
    assert side.counts("fallbacks") == {"bad-parameters": 1}
    assert side.counts("requests") == {"plain": 1}
    side.give(request, 0, more=70)
    assert side.step().is_empty
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": "bad-parameters"}
    assert side.is_forgotten(request)


def test_a_plain_request_is_counted_and_reported_without_a_reason():
    side = Side()
    request = side.add(make_request("plain", FIRST, report=True))
    assert side.ask(request) == (0, False)
    assert (side.counts("fallbacks"), side.counts("requests")) == ({}, {"plain": 1})
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": None}


@pytest.mark.parametrize("params", [{}, {"report": False}, {"report": "yes"}])
def test_only_who_asks_gets_a_report(params):
    side = Side()
    for name, parts in (("with", (SYSTEM, FIRST, QUESTION)), ("without", (SYSTEM,))):
        request = side.add(make_request(name, *parts, **params))
        assert side.scheduler.finished(request) is None


def test_after_a_failed_self_test_nothing_is_reused():
    side = Side()
    side.store(FIRST)
    early = side.add(ask_about(FIRST, name="early"))
    side.report(is_off=True)
    late = side.add(ask_about(FIRST, name="late"))
    assert side.counts("fallbacks") == {"self-test": 1}
    for request in (early, late):
        assert side.ask(request) == (0, False)
    assert side.counts("fallbacks") == {"self-test": 2}
    assert side.counts("requests") == {"plain": 2}
    for request in (early, late):
        assert side.scheduler.finished(request)["fallback_reason"] == "self-test"
        assert side.is_forgotten(request)


def test_one_rank_that_failed_turns_all_off():
    side = Side(shape={"ranks": 2})
    side.report(rank=1, is_off=True)
    side.report(rank=0)
    side.add(ask_about(FIRST))
    assert side.counts("fallbacks") == {"self-test": 1}
