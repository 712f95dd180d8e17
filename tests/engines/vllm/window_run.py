"""A run of a model with sliding windows in a process of its own: ``python -m tests.engines.vllm.window_run JSON``.

The same prompts with and without ``window_tails`` have to give the same answers from the same hits."""

import json
import random
import sys

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.engines.vllm.compat import paged_cache
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_prefix_blocks import ask, exact


def block_pool(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def spoil_free_blocks(llm):
    """A free block holds whatever its last owner left there."""
    pool = block_pool(llm)
    free = [block.block_id for block in pool.blocks[1:] if not block.ref_cnt and not block.block_hash]
    for layer in get_kv_transfer_group().loader._forward.layers:
        cache = paged_cache(layer)
        cache.index_fill_(cache.shape.index(len(pool.blocks)), torch.tensor(free, device=cache.device), 30.0)


def run(model: str, seed: int, part: int, vocabulary: int, rounds: int, **settings):
    """Answers, cached tokens and stored bytes, of documents and of ``rounds`` conversations. Parts of exact prefixes
    have ``part`` tokens."""
    from kvmosaic.vllm import LLM

    chance = random.Random(seed)

    def draw(count):
        return [chance.randrange(10, vocabulary) for _ in range(count)]

    llm = LLM(model, enable_chunk_cache=True, prefix_blocks=True, **SMALL | {"max_model_len": 4 * part} | settings)
    store = get_kv_transfer_group().loader.cache.store
    outputs, branches = [], []

    def forget():
        ask(llm, [11, 12, 13])  # the last request's KV is stored with the next step
        assert llm.reset_prefix_cache()

    def said(tokens, **params):
        spoil_free_blocks(llm)
        [output] = ask(llm, tokens, **params)
        outputs.append(output)
        return output

    def held():
        store.flush()
        return sum(nbytes for _, nbytes in store.held().values())

    # Documents, then the same ones in other prompts: other places, other neighbours, some new ones among them.
    system, documents = draw(20), [draw(chance.randint(part // 2, part)) for _ in range(4)]
    for picked in ((0, 1), (1, 0), (2, 1), (3, 2), (1, 3)):
        tokens, boundaries = list(system), [(0, len(system))]
        for index in picked:
            boundaries.append((len(tokens), len(tokens) + len(documents[index])))
            tokens += documents[index]
        for ratio in (0.0, 0.1):
            spans = [*boundaries, (len(tokens), len(tokens) + 10)]
            params = {"boundaries": spans, "recompute_ratio": ratio, "policy": "sink-link"}
            said(tokens + draw(10), **params)
    chunk_bytes = held()
    # Conversations that grow, come back after vLLM forgot them, and branch while vLLM has them from the store.
    for _ in range(rounds):
        turn = draw(part + chance.randint(1, part))
        for _ in range(2):
            answer = said(turn)
            forget()
            said(turn)
            for _ in range(2):
                branches.append(len(outputs))
                said(turn[: chance.randrange(part // 4, len(turn))] + draw(20))
            turn = turn + list(answer.outputs[0].token_ids) + draw(part // 4)
        forget()
    return {
        "answers": [exact(output) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "branches": branches,
        "chunk_bytes": chunk_bytes,
        "prefix_bytes": held() - chunk_bytes,
    }


if __name__ == "__main__":
    result = run(**json.loads(sys.argv[1]))
    print(json.dumps(result))
