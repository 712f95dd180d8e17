"""Run as a program by the test beside it: a process of its own, as vLLM's workers are told their cores at its start.

Prints one JSON line: answers (and tokens reported as cached) at ratio 0.0 with documents first filled, then reused,
then missing on one rank alone; blended; by full prefill, and at ratio 1.0.
"""

import json
import random
import sys

from vllm import SamplingParams

from kvmosaic.vllm import LLM


def forget_some(worker):
    """Rank 1 loses every other entry."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    if connector.loader._ranks.rank == 1:
        hashes = sorted(info.key.content_hash for info in connector.loader.cache.store.scan())
        connector.loader.cache.store.clear(lambda key: key.content_hash in hashes[::2])
    return connector.loader._ranks.share.together


def main(model: str, ranks: int) -> None:
    llm = LLM(
        model,
        enable_chunk_cache=True,
        tensor_parallel_size=ranks,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=1024,
        disable_log_stats=False,
    )
    chance = random.Random(1)
    documents = [[chance.randrange(3, 512) for _ in range(chance.randint(20, 70))] for _ in range(5)]

    def ask(order, system, **params):
        parts = [[system] * 9, *[documents[i] for i in order], [7, 8, 9]]
        ids = [token for part in parts for token in part]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
        params["boundaries"] = list(zip([0, *ends], ends, strict=False))
        sampling = SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        [output] = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    result = {
        "filled": ask([0, 1, 2, 3, 4], 12),
        "moved": ask([4, 2, 0, 1, 3], 13),
        "all": ask([0, 1, 2, 3, 4], 11, recompute_ratio=1.0)[0],
        "asked": ask([3, 1, 0, 2, 4], 15, recompute_ratio=0.5, policy="composite(asking=1)"),
        "checked": ask([3, 1, 0, 2, 4], 16, recompute_ratio=0.8, policy="kv-deviation(layers=0)"),
    }
    result["heads"] = llm.collective_rpc(forget_some)
    result["plain"] = ask([0, 1, 2, 3, 4], 11, chunk_cache=False)[0]
    result["one_rank_forgot"] = ask([4, 2, 0, 1, 3], 14)
    result["reused_again"] = ask([4, 2, 0, 1, 3], 15)
    result["document_tokens"] = sum(len(document) for document in documents)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
