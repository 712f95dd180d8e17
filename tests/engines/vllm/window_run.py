"""A run of a model with sliding windows in a process of its own: ``python -m tests.engines.vllm.window_run JSON``.

The same prompts with and without ``window_tails`` have to give the same answers from the same hits."""

import json
import random
import sys

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_prefix_blocks import ask, exact


def run(model: str, seed: int, part: int, vocabulary: int, **settings):
    """Answers, cached tokens and stored bytes. Parts of exact prefixes have ``part`` tokens."""
    from kvmosaic.vllm import LLM

    chance = random.Random(seed)

    def draw(count):
        return [chance.randrange(10, vocabulary) for _ in range(count)]

    llm = LLM(model, enable_chunk_cache=True, prefix_blocks=True, **SMALL | {"max_model_len": 4 * part} | settings)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group().loader.cache.store
    outputs = []

    def forget():
        ask(llm, [11, 12, 13])  # the last request's KV is stored with the next step
        assert llm.reset_prefix_cache()

    def held():
        store.flush()
        return sum(nbytes for _, nbytes in store.held().values())

    # Documents, then the same ones in other prompts: other places, other neighbours, some new ones among them.
    system, documents = draw(20), [draw(chance.randint(part // 2, part)) for _ in range(4)]
    for picked in ((0, 1), (1, 0), (2, 1), (3, 2), (1, 3)):
        tokens, boundaries = list(system), []
        for index in picked:
            boundaries.append((len(tokens), len(tokens) + len(documents[index])))
            tokens += documents[index]
        for ratio in (0.0, 0.1):
            params = {"boundaries": boundaries, "recompute_ratio": ratio, "policy": "sink-link"}
            outputs += ask(llm, tokens + draw(10), **params)
    chunk_bytes = held()
    # Conversations that grow, branch and come back after vLLM forgot them.
    for _ in range(3):
        turn = draw(part + chance.randint(1, part))
        for _ in range(3):
            [answer] = ask(llm, turn)
            outputs.append(answer)
            if chance.random() < 0.7:
                forget()
            branch = chance.randrange(len(turn) // 2, len(turn))
            outputs += ask(llm, turn[:branch] + draw(20))
            turn = turn + list(answer.outputs[0].token_ids) + draw(part // 4)
        forget()
    return {
        "answers": [exact(output) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "chunk_bytes": chunk_bytes,
        "prefix_bytes": held() - chunk_bytes,
    }


if __name__ == "__main__":
    result = run(**json.loads(sys.argv[1]))
    print(json.dumps(result))
