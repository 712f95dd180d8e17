"""Run as a program by the test beside it: a process of its own, as vLLM's workers are told their cores at its start.

Prints one JSON line: answers (and tokens reported as cached) at ratio 0.0 with documents first filled, then reused,
then missing on one rank alone; blended; by full prefill, and at ratio 1.0, also in slices while another decodes.
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


def count_slices(worker):
    """Have a rank count the slices that it hands out from now on."""
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
        max_num_batched_tokens=64,
        disable_log_stats=False,
    )
    chance = random.Random(1)
    documents = [[chance.randrange(3, 512) for _ in range(chance.randint(20, 70))] for _ in range(5)]

    def ask(order, system, others=(), **params):
        parts = [[system] * 9, *[documents[i] for i in order], [7, 8, 9]]
        ids = [token for part in parts for token in part]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
        params["boundaries"] = list(zip([0, *ends], ends, strict=False))
        sampling = SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        prompts = [*({"prompt_token_ids": other} for other in others), {"prompt_token_ids": ids}]
        longer = [SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False) for _ in others]
        *_, output = llm.generate(prompts, [*longer, sampling], use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    result = {
        "filled": ask([0, 1, 2, 3, 4], 12),
        "moved": ask([4, 2, 0, 1, 3], 13),
        "all": ask([0, 1, 2, 3, 4], 11, recompute_ratio=1.0)[0],
        "asked": ask([3, 1, 0, 2, 4], 15, recompute_ratio=0.5, policy="composite(asking=1)"),
        "checked": ask([3, 1, 0, 2, 4], 16, recompute_ratio=0.8, policy="kv-deviation(layers=0)"),
    }
    llm.collective_rpc(count_slices)
    other = [chance.randrange(3, 512) for _ in range(64)]  # a whole step: it decodes when the next one is scheduled
    assert llm.reset_prefix_cache()
    result["in_slices"] = ask([0, 1, 2, 3, 4], 11, [other], recompute_ratio=1.0)[0]
    result["slices"] = llm.collective_rpc(slices_counted)
    result["heads"] = llm.collective_rpc(forget_some)
    result["plain"] = ask([0, 1, 2, 3, 4], 11, chunk_cache=False)[0]
    result["one_rank_forgot"] = ask([4, 2, 0, 1, 3], 14)
    result["reused_again"] = ask([4, 2, 0, 1, 3], 15)
    result["document_tokens"] = sum(len(document) for document in documents)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
