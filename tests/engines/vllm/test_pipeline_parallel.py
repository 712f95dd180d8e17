"""Two real pipeline stages: each has its own layers and its own store, and they must agree."""

from typing import Any

import pytest
import torch

from tests.engines.vllm.helpers import PART, chosen_last, draw, fail, greedy, join, store, worker_side
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_tensor_parallel import STEP, answers
from tests.engines.vllm.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]

LAYERS, SPLIT = 6, 4
"""Number of layers, and of those in the first stage. Both stages have middle layers, which policies probe."""
SETTINGS = {
    "miss_policy": "fill-first",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": STEP,
    "num_gpu_blocks_override": 48,
    "prefix_blocks": True,
}
"""Settings with few blocks, so that several long answers do not fit together."""
POLICIES = [
    {"recompute_ratio": 0.0},
    {"recompute_ratio": 0.3, "policy": "sink-link(k=4)"},
    {"recompute_ratio": 0.6, "policy": "query-attention(layers=2)"},
    {"recompute_ratio": 0.8, "policy": "kv-deviation(layers=1)"},
    {"recompute_ratio": 0.95, "policy": "kv-deviation(layers=4)"},
    {"recompute_ratio": 0.8, "policy": "kv-deviation(layers=3,part=v)"},
    {"recompute_ratio": 0.5, "policy": "composite"},
]
FAULTS = {
    "lookup": ("cache", "store", "lookup"),
    "fill": ("paged", "fill"),
    "place": ("paged", "place"),
    "probe": ("forward", "probe"),
    "metadata": ("forward", "_metadata", "build"),
    "compute": ("paged", "compute"),
    "model": ("forward", "_runner", "model", "forward"),
}
"""Places where a stage fails, as paths from the worker's side. The last three fail once: if they always failed, no
request could be computed, and the engine would end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("six"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def two(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PP_LAYER_PARTITION", f"{SPLIT},{LAYERS - SPLIT}")
        started = EngineApart(model, stages=2, **SETTINGS)
    with started as engine:
        yield engine


@pytest.fixture(scope="module")
def one(model):
    with EngineApart(model, **SETTINGS) as engine:
        yield engine


# --- functions that run in the engines' processes


def ask(llm: Any, *prompts: list[list[int]], count: int = 8, **params: Any) -> list[list[int]]:
    """Answers to prompts of parts (system, chunks, question) that are sent together."""
    given, wanted = [], []
    for parts in prompts:
        ids, boundaries = join(parts)
        given.append({"prompt_token_ids": ids})
        own = params if params.get("chunk_cache") is False else {**params, "boundaries": boundaries}
        wanted.append(greedy(count, detokenize=False, params=own))
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, wanted, use_tqdm=False)]


def ask_afresh(llm: Any, *prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """Answers to such prompts, with nothing from vLLM's own prefix cache."""
    assert llm.reset_prefix_cache()
    return ask(llm, *prompts, **params)


def talk(llm: Any, tokens: list[int], count: int) -> tuple[list[int], int]:
    """An answer, and the number of the prompt's tokens that our cache had."""
    assert llm.reset_prefix_cache()
    [output] = llm.generate({"prompt_token_ids": tokens}, greedy(count, detokenize=False), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def on_ranks(llm: Any, function: Any) -> list[Any]:
    return llm.collective_rpc(function)


def preemptions(llm: Any) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


def off_reason(worker: Any) -> str | None:
    return worker_side().off_reason


def share(worker: Any) -> str:
    return str(worker_side().ranks.share.heads)


def choice(worker: Any) -> tuple[int, ...]:
    return chosen_last()


def entries(worker: Any) -> dict[bytes, list[tuple[Any, Any]]]:
    """K and V of each layer, by content hash."""
    found = {}
    for info in store().scan():
        entry = store().peek(info.key)
        if entry is not None and info.kind == "document":
            found[info.key.content_hash] = [
                tuple(rows.numpy() for rows in entry.layer(layer)) for layer in range(entry.format.layers)
            ]
    return found


class Fault:
    """A fault in one stage, in its first call or in all calls, until it is mended."""

    def __init__(self, stage: int, path: tuple[str, ...], times: int) -> None:
        self._stage, self._path, self._times = stage, path, times

    def __call__(self, worker: Any) -> None:
        side = worker_side()
        if side.ranks.rank != self._stage:
            return
        *parents, name = self._path
        owner: Any = side
        for parent in parents:
            owner = getattr(owner, parent)
        really, left = getattr(owner, name), [self._times]

        def failing(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            return fail() if left[0] >= 0 else really(*args, **kwargs)

        setattr(owner, name, failing)
        side.mend = lambda: delattr(owner, name) or left[0] < self._times


def mend(worker: Any) -> bool:
    """End the fault. Returns whether it occurred."""
    side = worker_side()
    if not hasattr(side, "mend"):
        return False
    met = side.mend()
    del side.mend
    return bool(met)


# --- the tests


def documents() -> list[list[int]]:
    return [draw(length) for length in (21, 33, 48, 64, 70)]


def test_each_stage_keeps_its_layers_as_one_stage_would(two, one):
    texts = documents()
    prompt = [[12] * 9, *texts, [7, 8, 9]]
    assert two.call(on_ranks, off_reason) == [None, None]
    assert two.call(on_ranks, share) == [f"0-3of4L0-{SPLIT - 1}", f"0-3of4L{SPLIT}-{LAYERS - 1}"]
    assert two.call(ask_afresh, prompt) == one.call(ask_afresh, prompt)
    first, second = two.call(on_ranks, entries)
    [whole] = one.call(on_ranks, entries)
    assert len(whole) >= len(texts)
    assert first.keys() == second.keys() == whole.keys()
    for digest, layers in whole.items():
        theirs = first[digest] + second[digest]
        assert len(theirs) == len(layers) == LAYERS
        for ours, right in zip(theirs, layers, strict=True):
            for part, wanted in zip(ours, right, strict=True):
                torch.testing.assert_close(torch.from_numpy(part), torch.from_numpy(wanted), atol=1e-5, rtol=1e-4)


def test_what_one_stage_tests_for_two_ranks(two, one):
    """Chunks are filled, moved, blended, missing on one stage only, and loaded in slices beside another request."""
    texts, other = documents(), draw(STEP)
    theirs, ours = one.call(answers, texts, other), two.call(answers, texts, other)
    assert ours["all"] == ours["plain"] == theirs["plain"] == ours["in_slices"]
    assert ours["slices"][0] == ours["slices"][1] > 1
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert ours[case][0] == theirs[case][0], case
    assert 0 < ours["one_rank_forgot"][1] < ours["moved"][1] == sum(map(len, texts))


@pytest.mark.parametrize("params", POLICIES, ids=lambda params: params.get("policy", "none"))
def test_policies_choose_the_same_tokens(two, one, params):
    """This holds for any stage that has the probed layers."""
    texts = documents()
    order = [[13] * 12, *texts[::-1], draw(20)]
    for engine in (two, one):
        engine.call(ask, [[12] * 9, *texts, [7, 8, 9]])
    assert two.call(ask_afresh, order, **params) == one.call(ask_afresh, order, **params)
    if params["recompute_ratio"]:
        [wanted] = one.call(on_ranks, choice)
        assert two.call(on_ranks, choice) == [wanted, wanted]
        assert wanted


@pytest.mark.long
def test_requests_of_all_kinds_at_once_with_preemptions(two):
    """At ratio 1.0 every answer is the plain one."""
    texts = documents()
    prompts = [[[20 + n] * (9 + n), *texts[n % 3 :], draw(5 + n)] for n in range(8)]
    plain = [two.call(ask_afresh, prompt, count=100, chunk_cache=False)[0] for prompt in prompts]
    before = two.call(preemptions)
    assert two.call(ask_afresh, *prompts, count=100, recompute_ratio=1.0) == plain
    assert two.call(preemptions) > before, "the engine has too much room for this test"


def test_exact_prefixes_are_saved_and_loaded_by_both_stages(two):
    opening = draw(PART + 20)
    conversation = [*opening, *two.call(talk, opening, 40)[0], 5, 6, 7]
    two.call(talk, draw(5), 2)  # with its step the last segment is stored
    said, cached = two.call(talk, conversation, 8)
    assert cached == PART
    assert [said] == two.call(ask_afresh, [conversation], chunk_cache=False)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_stage_fails(two, fault, stage):
    """All stages continue with right results: prompts that were recomputed as a whole, or could not be placed, equal
    a plain prefill."""
    asked = {"recompute_ratio": 0.6, "policy": "query-attention(layers=2)"}
    met = False
    for params in ({"recompute_ratio": 1.0}, asked):
        texts = documents()
        few = texts[:3] if fault == "fill" else texts[2:]  # a load fills no more than a step
        prompt = [[30 + stage] * 40, *few, draw(9)]
        once = fault in ("metadata", "compute", "model")
        two.call(on_ranks, Fault(stage, FAULTS[fault], 1 if once else 1000))
        [said] = two.call(ask_afresh, prompt, **params)
        met |= two.call(on_ranks, mend)[stage]
        [plain] = two.call(ask_afresh, prompt, chunk_cache=False)
        if params["recompute_ratio"] == 1.0 or fault == "place":
            assert said == plain
        assert len(said) == len(plain)
        [again] = two.call(ask_afresh, prompt, recompute_ratio=1.0)
        assert again == plain
    assert met
