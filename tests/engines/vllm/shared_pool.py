"""Run as a program by the test beside it: one engine that may share a pool with engines of other sizes.

Arguments: the model, how many ranks, the pool's URL or ``none``, which sets of documents to ask about, and
conversations to go on with, by the number of a set. Prints one JSON line: for each set the answers to two prompts and
what became of each document; the next turn of its conversation and how many tokens of that were cached, or else a
conversation that was just had; and the heads of every rank.
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


def main(model: str, ranks: int, url: str, sets: list[int], conversations: dict[str, list[int]]) -> None:
    llm = LLM(
        model,
        enable_chunk_cache=True,
        miss_policy="fill-first",
        **({} if url == "none" else {"remote": url, "per_head_storage": True, "remote_deadline_ms": 10_000}),
        prefix_blocks=url != "none",
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

    def talk(tokens, count):
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    result = {}
    for number in sets:
        chance = random.Random(number)
        documents = [[chance.randrange(3, 512) for _ in range(chance.randint(20, 70))] for _ in range(5)]
        (first, fate), (second, _) = ask(documents, 12), ask([documents[i] for i in (4, 2, 0, 1, 3)], 13)
        result[number] = {"answers": [first, second], "fate": fate}
        if str(number) in conversations:
            result[number]["turn"], result[number]["cached"] = talk(conversations[str(number)], 8)
        else:
            opening = [chance.randrange(3, 512) for _ in range(280)]
            result[number]["conversation"] = [*opening, *talk(opening, 250)[0], 5, 6, 7]
    result["ranks"] = llm.collective_rpc(flush)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], list(map(int, sys.argv[4].split(","))), json.loads(sys.argv[5]))
