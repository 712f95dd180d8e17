"""Two real tensor-parallel ranks: each has its own heads and its own store, and they must agree."""

from typing import Any

import pytest
import torch

from kvmosaic.engines.vllm.forward.runs import Run
from tests.engines.vllm.helpers import draw, greedy, join, start, store, worker_side
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
]

STEP = 64
"""Maximum number of tokens in a step of vLLM."""
SETTINGS = {
    "miss_policy": "fill-first",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": STEP,
}


def forget_some(worker):
    """Rank 1 loses every other document."""
    side = worker_side()
    if side.ranks.rank == 1:
        hashes = sorted(info.key.content_hash for info in store().scan() if info.kind == "document")
        store().clear(lambda key: key.content_hash in hashes[::2])
    return side.ranks.share.together


def count_slices(worker):
    """Make a rank count the slices that it hands out from now on."""
    from kvmosaic.engines.vllm.worker_side.slices import Slices

    go_on, Slices.handed = Slices.go_on, 0

    def counted(self, room):
        handed = go_on(self, room)
        Slices.handed += len(handed)
        return handed

    Slices.go_on = counted


def slices_counted(worker):
    from kvmosaic.engines.vllm.worker_side.slices import Slices

    return Slices.handed


def answers(llm: Any, documents: list[list[int]], other: list[int]) -> dict[str, Any]:
    """Answers (and tokens reported as cached) at ratio 0.0 with documents first filled, then reused, then missing on
    one rank alone; blended; by full prefill, and at ratio 1.0, also in slices while another decodes."""

    def ask(order, system, others=(), **params):
        ids, boundaries = join([[system] * 9, *[documents[i] for i in order], [7, 8, 9]])
        prompts = [{"prompt_token_ids": each} for each in (*others, ids)]
        longer = [greedy(60, detokenize=False) for _ in others]
        ours = greedy(12, detokenize=False, params={**params, "boundaries": boundaries})
        *_, output = llm.generate(prompts, [*longer, ours], use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    assert llm.reset_prefix_cache(reset_connector=True)  # no entries of other tests are stored
    result = {
        "filled": ask([0, 1, 2, 3, 4], 12),
        "moved": ask([4, 2, 0, 1, 3], 13),
        "all": ask([0, 1, 2, 3, 4], 11, recompute_ratio=1.0)[0],
        "asked": ask([3, 1, 0, 2, 4], 15, recompute_ratio=0.5, policy="composite(asking=1)"),
        "checked": ask([3, 1, 0, 2, 4], 16, recompute_ratio=0.8, policy="kv-deviation(layers=0)"),
    }
    llm.collective_rpc(count_slices)
    assert llm.reset_prefix_cache()
    result["in_slices"] = ask([0, 1, 2, 3, 4], 11, [other], recompute_ratio=1.0)[0]
    result["slices"] = llm.collective_rpc(slices_counted)
    result["heads"] = llm.collective_rpc(forget_some)
    result["plain"] = ask([0, 1, 2, 3, 4], 11, chunk_cache=False)[0]
    result["one_rank_forgot"] = ask([4, 2, 0, 1, 3], 14)
    result["reused_again"] = ask([4, 2, 0, 1, 3], 15)
    return result


@pytest.mark.parametrize("kv_heads", [4, 1], ids=["split heads", "more ranks than heads"])
def test_two_ranks_answer_as_one(tmp_path, kv_heads):
    model = write_tiny_llama(tmp_path, kv_heads)
    documents = [draw(length) for length in (21, 33, 48, 64, 70)]
    other = draw(STEP)  # a whole step: it decodes when the next one is scheduled
    with EngineApart(model, ranks=2, **SETTINGS) as engine:
        two = engine.call(answers, documents, other)
    one = answers(start(model, **SETTINGS), documents, other)
    assert two["heads"] == (["0-1of4", "2-3of4"] if kv_heads == 4 else ["0-0of1", "0-0of1"])
    assert two["all"] == two["plain"] == one["plain"] == two["in_slices"]
    assert two["slices"][0] == two["slices"][1] > 1
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert two[case][0] == one[case][0], case
    total = sum(map(len, documents))
    assert 0 < two["asked"][1] < total
    cached = {case: two[case][1] for case in ("filled", "moved", "one_rank_forgot", "reused_again")}
    assert cached["filled"] == 0
    assert cached["moved"] == cached["reused_again"] == total
    assert 0 < cached["one_rank_forgot"] < total
    assert one["one_rank_forgot"][1] == total


def graphs_of_passes(worker):
    """Number of graphs that torch compiles for passes of several lengths, in the mode of vLLM's steps."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        for count in (1, 2, STEP):
            worker_side().forward.run([Run(draw(count), 0, [list(range(1, 1 + STEP))])])
    return counters["stats"]["unique_graphs"] - before


def compiled(llm):
    return llm.collective_rpc(graphs_of_passes)


def test_no_step_compiles_code(tmp_path):
    """It would take seconds. vLLM compiles the embedding's masks if there are several ranks."""
    with EngineApart(write_tiny_llama(tmp_path), 2, self_test=False, **SETTINGS) as engine:
        assert engine.call(compiled) == [0, 0]
