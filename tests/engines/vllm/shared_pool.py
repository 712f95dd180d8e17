"""Run as a program by the test beside it: one engine that may share a pool with engines of other sizes.

Arguments: the model, how many ranks, the pool's URL or ``none``, and which sets of documents to ask about. Prints one
JSON line: for each set the answers to two prompts, and what became of each document; and the heads of every rank.
"""

import json
import random
import sys

from vllm import SamplingParams

from kvmosaic.vllm import LLM


def flush(worker):
    """Have everything in the pool; what this rank holds."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    store = connector.loader.cache.store
    store.flush()
    return str(connector.loader._ranks.share.heads), store.get_stats()["write_errors"]


def main(model: str, ranks: int, url: str, sets: list[int]) -> None:
    llm = LLM(
        model,
        enable_chunk_cache=True,
        miss_policy="fill-first",
        **({} if url == "none" else {"remote": url, "per_head_storage": True, "remote_deadline_ms": 10_000}),
        tensor_parallel_size=ranks,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=1024,
        disable_log_stats=False,
    )

    def ask(documents, system):
        parts = [[system] * 9, *documents, [7, 8, 9]]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
        params = {"boundaries": list(zip([0, *ends], ends, strict=False)), "report": True}
        sampling = SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        prompt = {"prompt_token_ids": [token for part in parts for token in part]}
        [output] = llm.generate(prompt, sampling, use_tqdm=False)
        chunks = [(chunk["status"], chunk.get("tier")) for chunk in output.kv_transfer_params["chunks"]]
        return list(output.outputs[0].token_ids), chunks

    result = {}
    for number in sets:
        chance = random.Random(number)
        documents = [[chance.randrange(3, 512) for _ in range(chance.randint(20, 70))] for _ in range(5)]
        (first, fate), (second, _) = ask(documents, 12), ask([documents[i] for i in (4, 2, 0, 1, 3)], 13)
        result[number] = {"answers": [first, second], "fate": fate}
    result["ranks"] = llm.collective_rpc(flush)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], list(map(int, sys.argv[4].split(","))))
