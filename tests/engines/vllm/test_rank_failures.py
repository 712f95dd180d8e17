"""Two real ranks, one of which fails at some stage: neither waits for the other, and the answers stay right."""

from typing import Any

import pytest
import torch

from tests.engines.vllm.helpers import draw, fail, greedy, join, worker_side
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024, "prefix_blocks": True}
STAGES = {
    "pin": ("cache", "store", "pin"),
    "lookup": ("cache", "store", "lookup"),
    "fill": ("paged", "fill"),
    "place": ("paged", "place"),
    "probe": ("forward", "probe"),
    "sum": ("paged", "reused"),
    "metadata": ("forward", "_metadata", "build"),
    "compute": ("paged", "compute"),
    "put": ("cache", "store", "put"),
    "read": ("paged", "read"),
    "clear": ("cache", "store", "clear"),
    "changes": ("cache", "store", "take_changes"),
    "statistics": ("cache", "store", "held"),
    "fetch": ("fetcher", "kept_for"),
}
"""Places where rank 1 fails, as paths from the worker's side."""
ALWAYS_IS_FATAL = ("metadata", "compute")
"""Stages that end the engine, like vLLM's own forward, if not even plain text can be computed."""
PROBES = [
    {"recompute_ratio": 1.0},
    {"recompute_ratio": 0.5, "policy": "composite(asking=1)"},
    {"recompute_ratio": 0.8, "policy": "kv-deviation(layers=0)"},
]


class _Fault:
    """A fault on rank 1, in the first call or in all calls, until it is mended."""

    def __init__(self, path: tuple[str, ...], times: int) -> None:
        self._path = path
        self._times = times

    def __call__(self, worker: Any) -> bool:
        side = worker_side()
        if side.ranks.rank != 1:
            return False
        *parents, name = self._path
        owner: Any = side
        for parent in parents:
            owner = getattr(owner, parent)
        really, left = getattr(owner, name), [self._times]

        def failing(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            return fail() if left[0] >= 0 else really(*args, **kwargs)

        setattr(owner, name, failing)
        side.mend = lambda: delattr(owner, name)
        return True


def mend(worker: Any) -> None:
    side = worker_side()
    if hasattr(side, "mend"):
        side.mend()
        del side.mend


def faulty_answers(llm: Any, stages: dict[str, tuple[str, ...]], seeds: list[list[list[int]]]) -> list[Any]:
    """For each stage and policy: the failure, the tokens of the answer during the failure, and the right tokens."""
    results = []
    for (stage, path), documents in zip(stages.items(), seeds, strict=True):
        for number, params in enumerate(PROBES):
            ids, boundaries = join([[20 + number] * 40, *documents[: 2 + number % 2], [7, 8, 9]])
            other = documents[number][:10] * 30
            assert llm.reset_prefix_cache(reset_connector=stage == "clear")
            llm.collective_rpc(_Fault(path, 1 if stage in ALWAYS_IS_FATAL else 1000))
            if stage == "clear":
                assert llm.reset_prefix_cache(reset_connector=True)
            ours = greedy(6, detokenize=False, params={**params, "boundaries": boundaries})
            prompts = [{"prompt_token_ids": ids}, {"prompt_token_ids": other}]
            outputs = llm.generate(prompts, [ours, greedy(6, detokenize=False)], use_tqdm=False)
            llm.collective_rpc(mend)
            assert llm.reset_prefix_cache()
            plainly = greedy(6, detokenize=False, params={"chunk_cache": False})
            salted = [{**each, "cache_salt": f"{stage} {number}"} for each in prompts]
            plain = llm.generate(salted, plainly, use_tqdm=False)
            said = [[list(output.outputs[0].token_ids) for output in each] for each in (outputs, plain)]
            results.append((stage, params, said))
    return results


def test_one_rank_fails(tmp_path):
    seeds = [[draw(length) for length in (40, 70, 55)] for _ in STAGES]
    with EngineApart(write_tiny_llama(tmp_path), ranks=2, **SETTINGS) as engine:
        results = engine.call(faulty_answers, STAGES, seeds)
    assert len(results) == len(STAGES) * len(PROBES)
    for stage, params, ((ours, other), (plain, plain_other)) in results:
        assert other == plain_other, (stage, params)
        if params["recompute_ratio"] == 1.0 or stage == "place":
            assert ours == plain, (stage, params)
        assert len(ours) == len(plain)
