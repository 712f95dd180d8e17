"""Input that is wrong, far too long or of another kind costs its client reuse, and costs other clients nothing.

Sizes are so large that quadratic work would take minutes.
"""

import logging
import math
import random
import re
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logging_utils.dump_input import prepare_object_to_dump

from kvmosaic.core.limits import MAX_BOUNDARIES, MAX_CHUNKS, MAX_DOCUMENTS, MAX_POLICY_LENGTH
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.parameters import RequestParameters
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SYSTEM,
    Side,
    ask_about,
    digest_of,
    make_request,
    text,
)
from tests.engines.vllm.scheduler_side.simulation import Simulation

LONG = 1_000_000
LINE = 400
"""Maximum characters of a line in the log."""


def serve(side, request):
    """Run a request from its arrival to its end on the scheduler side. Returns its report."""
    side.add(request)
    external, blocks = side.begin(request, more=request.num_prompt_tokens)
    side.step(scheduled={request.request_id: 1}, computed={request.request_id: external}, new=frozenset())
    told = side.scheduler.finished(request)
    side.pool.free_blocks([side.pool.blocks[block] for block in blocks])
    assert side.is_forgotten(request)
    return told


def sent(params, name="request", parts=(SYSTEM, FIRST, QUESTION)):
    """A request with exactly these parameters, of any kind."""
    request = make_request(name, [token for part in parts for token in part])
    request.kv_transfer_params = params
    return request


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvmosaic")]


# --- of any size


@pytest.mark.parametrize(
    "params",
    [
        {"policy": " " * LONG + "!"},
        {"policy": "composite" + " " * LONG + "("},
        {"policy": "a-" * LONG},
        {"policy": "kv-deviation(layers=" + "1+" * LONG + "1)"},
        {"policy": "sink-link(" + "k=1," * LONG + ")"},
        {"policy": "sink-link(k=" + "9" * LONG + ")"},
        {"boundaries": [[0, 1]] * LONG},
        {"boundaries": [[]] * LONG},
        {"boundaries": [list(range(LONG))] * 3},
        {"boundaries": "[" * LONG},
        {"boundaries": [[0, 20], [20, 10**4000], [60, 70]]},
        {"boundaries": [[0, "1" * LONG]] * 3},
        {"recompute_ratio": 10**4000},
        {"recompute_ratio": "0" * LONG},
        {"chunk_cache": [0] * LONG},
        {"report": "yes" * LONG},
    ],
    ids=lambda params: f"{next(iter(params))}-{str(next(iter(params.values())))[:12]!r}" if params else "",
)
def test_far_too_much_of_anything_is_one_short_line(params, caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        assert serve(side, sent(params)) is None
    [line] = lines(caplog)
    assert len(line) < LINE
    assert side.counts("fallbacks") == {"bad-parameters": 1}


@pytest.mark.parametrize(
    ("name", "longest", "more"),
    [
        ("policy", "composite".ljust(MAX_POLICY_LENGTH), " "),
        ("boundaries", [[0, 0]] * (MAX_BOUNDARIES - 1) + [[0, 70]], [[0, 0]]),
        ("documents", ["a document"] * MAX_DOCUMENTS, ["a document"]),
    ],
)
def test_what_is_wrong_by_its_length_alone_is_refused(name, longest, more):
    for value, fallbacks in ((longest, {}), (more + longest, {"bad-parameters": 1})):
        side = Side()
        serve(side, sent({name: value}))
        assert side.counts("fallbacks") == fallbacks


def test_of_parameters_of_others_names_alone_are_looked_at(caplog):
    with caplog.at_level(logging.WARNING):
        serve(Side(), sent({"remote_host": "x" * LONG, "other" * LONG: [[]] * LONG}))
    [line] = lines(caplog)
    assert "otherother" in line
    assert "remote" not in line
    assert len(line) < LINE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "composite".ljust(MAX_POLICY_LENGTH + 1)),
        ("seams", [["before", "question"]] * (MAX_DOCUMENTS + 1)),
        ("seams", [["before", 5]]),
        ("documents", ["a document", 5]),
        ("question", 5),
        ("boundaries", [[0, True]]),
        ("boundaries", [[-1, 5]]),
        ("boundaries", [[0, 2**31]]),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_wrong_value_goes_no_further_than_reading(name, value):
    """What comes later may take it for something else, or fail."""
    assert RequestParameters.read({name: value}, {name}).refused is Fallback.BAD_PARAMETERS


def test_few_of_many_names_are_looked_at():
    """A million names of other connectors, and behind them one that is unknown."""
    params = dict.fromkeys((f"remote_{number}" for number in range(LONG)), 1) | {"unknown": 1}
    assert RequestParameters.read(params, set()).unknown == ()


def test_wrong_parameters_are_reported_where_a_report_is_allowed():
    told = serve(Side(), sent({"recompute_ratio": 2, "report": True}))
    assert told == {"mode": "plain", "fallback_reason": "bad-parameters"}


def test_the_name_of_a_request_is_shown_in_part(caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        serve(side, sent({"policy": "oracle"}, name="mine\nERROR: all is lost" + "x" * LONG))
    [line] = lines(caplog)
    assert len(line) < LINE
    assert "\n" not in line


def test_many_chunks_behind_a_long_system_prompt_are_hashed_as_fast_as_alone():
    parts = list(range(500_000)), *[text(number, 16) for number in range(MAX_CHUNKS)], QUESTION
    seconds = []
    for context in ("alone", "system"):
        side, request = Side(chunk_context=context), make_request("request", *parts)
        begin = time.process_time()
        side.add(request)
        seconds.append(time.process_time() - begin)
        assert len(side.ours(request).digests) == MAX_CHUNKS
    alone, behind = seconds
    assert behind < 5 * alone


# --- of any kind

KINDS = [
    ["boundaries"],
    [],
    "report",
    "",
    b"report",
    5,
    0,
    0.5,
    math.nan,
    math.inf,
    True,
    False,
    {"report"},
    [{"report": True}],
    [[[[[[[[]]]]]]]],
]


@pytest.mark.parametrize("params", KINDS, ids=repr)
@pytest.mark.parametrize("parts", [(SYSTEM, FIRST, QUESTION), (SYSTEM,)], ids=["long", "short"])
def test_parameters_that_are_no_object(params, parts):
    """vLLM itself looks up keys in them after the connector has seen them."""
    side = Side()
    request = sent(params, parts=parts)
    side.add(request)
    assert request.kv_transfer_params is None
    assert side.scheduler.finished(request) is None
    assert side.is_forgotten(request)
    assert side.counts("fallbacks") == {"bad-parameters": 1}


def test_vllms_own_scheduler_goes_on_with_parameters_that_are_no_object():
    engine = Simulation()
    for number, params in enumerate(KINDS):
        engine.add(sent(params, name=str(number), parts=(SYSTEM,)))
    engine.finish(5000)
    engine.check_that_nothing_is_left()


@pytest.mark.parametrize("is_list", [False, True])
def test_texts_of_requests_go_no_further_than_the_planner(is_list):
    """vLLM sends sampling parameters to the workers, and logs them if the engine fails."""
    side, document = Side(), "A document that nobody else may see, of some words."
    texts = {"documents": [document], "question": document, "seams": [document[:20], document[20:]]}
    request = make_request("a", text(1, 50), **texts, report=True)
    request.sampling_params.extra_args["another"] = 7
    if is_list:
        request.kv_transfer_params = request.sampling_params.extra_args["kv_transfer_params"] = [document]
    sent = request.sampling_params
    side.add(request)
    assert "document" not in repr((request.sampling_params, request.kv_transfer_params))
    assert request.sampling_params.extra_args == {"another": 7}
    assert document in repr(sent)  # the caller's own


def test_a_failed_step_logs_no_tokens():
    """vLLM logs the scheduler's output if a step fails."""
    side = Side(miss_policy="fill-first")
    side.store(FIRST)
    side.begin(side.add(ask_about(FIRST, SECOND)))
    work = side.step()
    assert len(work.loads) == 1
    dumped = prepare_object_to_dump(SimpleNamespace(kv_connector_metadata=work))
    assert "StepWork(loads=1)" in dumped
    assert not {*SYSTEM, *FIRST, *SECOND, *QUESTION} & set(map(int, re.findall(r"\d+", dumped)))


def test_no_parameters_at_all_are_no_mistake():
    side = Side()
    assert serve(side, sent(None)) is None
    assert side.counts("fallbacks") == {}


deep: list = []
for _ in range(100_000):
    deep = [deep]

WEIRD = [
    None,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    2**63,
    10**4000,
    True,
    "",
    "\ud800",
    b"\xff",
    deep,
    {},
    {1: 2},
    1e-320,
]
NAMES = ["chunk_cache", "recompute_ratio", "policy", "boundaries", "report"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", WEIRD, ids=lambda value: f"{type(value).__name__}-{str(value)[:8]!a}" if value is not deep else "deep"
)
def test_a_value_of_any_kind(name, value, caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        serve(side, sent({name: value}))
    for line in lines(caplog):
        assert len(line) < LINE
        line.encode()  # a log may be a file


values = st.recursive(
    st.sampled_from([value for value in WEIRD if value is not deep]) | st.integers(-2, 80) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(params=st.dictionaries(st.sampled_from([*NAMES, "other"]), values, max_size=5) | values)
def test_anything_at_all(params):
    side = Side()
    told = serve(side, sent(params))
    is_wanted = isinstance(params, dict) and params.get("report") is True
    assert (told is not None) is is_wanted


# --- everything else that a request has


@pytest.mark.parametrize("salt", ["\ud800", "\udfff mine", "\0", "é" * LONG])
def test_a_salt_of_odd_characters_keeps_apart(salt):
    side = Side()
    request = ask_about(FIRST, cache_salt=salt, fields={"block_hasher": None})
    side.add(request)
    assert side.ours(request).digests[0] != digest_of(FIRST)
    other = side.add(ask_about(FIRST, name="other", cache_salt=salt + "!", fields={"block_hasher": None}))
    assert side.ours(other).digests != side.ours(request).digests


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 10**30])
def test_tokens_that_are_no_tokens(token):
    """vLLM refuses them before the connector sees them, but not in every release."""
    side = Side()
    request = make_request("odd", SYSTEM, [*FIRST[:-1], token], QUESTION, fields={"block_hasher": None})
    side.add(request)
    assert side.scheduler.finished(request) is None
    assert side.is_forgotten(request)


# --- parameters that clients may send


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_not_allowed_is_a_reason_of_its_own(name, caplog):
    """This holds for any value, because the value is not even read. Only a report that is not allowed is left out."""
    others = ",".join(each for each in NAMES if each != name)
    for value in (True, "x" * LONG):
        side = Side(client_parameters=others)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            told = serve(side, sent({name: value, "report": True} if name != "report" else {name: True}))
        if name == "report":
            assert (told, side.counts("fallbacks"), lines(caplog)) == (None, {}, [])
            continue
        assert told == {"mode": "plain", "fallback_reason": "not-allowed"}
        assert side.counts("fallbacks") == {"not-allowed": 1}
        [line] = lines(caplog)
        assert f"{name} is not allowed" in line
        assert len(line) < LINE


@pytest.mark.parametrize("allowed", ["none", "boundaries", None])
def test_reports_are_given_only_where_they_are_allowed(allowed):
    side = Side(**{} if allowed is None else {"client_parameters": allowed})
    told = serve(side, sent({"report": True}))
    assert (told is None) is (allowed is not None)


def test_where_nothing_is_allowed_prompts_without_parameters_are_served_as_ever():
    side = Side(client_parameters="none")
    assert serve(side, sent({"do_remote_prefill": False})) is None
    assert side.counts("fallbacks") == {}


# --- repeated work


def test_many_long_requests_that_wait_for_room_are_not_counted_through_in_every_step(monkeypatch):
    """vLLM asks about each of them in every step."""
    side = Side(shape={"max_positions": 10**6, "step_tokens": 2048}, blocks=5000)
    chunks = [text(number, 16) for number in range(1, MAX_CHUNKS)]
    side.store(*chunks)
    side.report(costs={"blend": Line(0, 1.0), "remap": Line(0, 0.001)})
    side.run("someone", 1, 1)
    system = text(5000, 2000)
    waiting = [
        side.add(make_request(str(number), system, *random.sample(chunks, len(chunks)), QUESTION))
        for number in range(40)
    ]
    asked = 0
    has = side.scheduler._mirror.has

    def counted(digest):
        nonlocal asked
        asked += 1
        return has(digest)

    for request in waiting:  # the first of them is admitted, and the step is full
        if side.matched(request):
            side.begin(request)
    monkeypatch.setattr(side.scheduler._mirror, "has", counted)
    steps = 25
    for _ in range(steps):
        for request in waiting[1:]:
            assert side.matched(request) is None
    assert asked <= 2 * len(waiting) * MAX_CHUNKS
