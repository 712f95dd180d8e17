"""Time to first token inside vLLM: full prefill, prefix-cache hit, and reuse in an order never seen, in one run.

Weights are random: the time does not depend on them, and none have to be fetched. The shape is that of Llama-3-8B.
"""

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 512
SYSTEM_TOKENS = 40
QUESTION_TOKENS = 20
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def run(
    context: int,
    layers: int,
    tier: str,
    eager: bool,
    policies: Sequence[str] = ("composite",),
    ratios: Sequence[float] = (0.0,),
    repeats: int = 5,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Medians in ms over ``repeats`` prompts of ``context`` tokens in chunks of 512, all cached in ``tier``
    (``device`` or ``host``), each time in a new order: by full prefill, by a hit in vLLM's prefix cache, and by reuse
    with every policy and ratio (0 once: there all policies are the same), after a system prompt that was used before
    and after one that was not."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import SamplingParams
    from vllm import __version__ as vllm_version

    from kvmosaic.vllm import LLM

    progress("starting vLLM")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        llm = LLM(
            folder,
            enable_chunk_cache=True,
            miss_policy="fill-first",
            chunk_cache_gpu_memory_fraction=0.15 if tier == "device" else 0.0,
            host_memory="40GiB",
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=eager,
            max_model_len=context + 4096,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.7,
        )
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1000, 100000) for _ in range(count)]

    def prompt(system: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        boundaries: list[tuple[int, int]] = []
        chance.shuffle(documents)
        for part in (system, *documents, tokens(QUESTION_TOKENS)):
            boundaries.append((len(ids), len(ids) + len(part)))
            ids += part
        return ids, boundaries

    def first_token_ms(ids: list[int], **params: Any) -> float:
        sampling = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    documents = [tokens(CHUNK_TOKENS) for _ in range(context // CHUNK_TOKENS)]
    known_system = tokens(SYSTEM_TOKENS)
    cases = dict.fromkeys(("none" if ratio == 0 else policy, ratio) for ratio in ratios for policy in policies)
    peers: dict[str, list[float]] = {"full_ms": [], "prefix_hit_ms": []}
    ours: dict[tuple[str, float], dict[str, list[float]]] = {
        case: {"reuse_ms": [], "reuse_new_system_ms": []} for case in cases
    }
    for number in range(-1, repeats):  # the first fills the cache and warms up; it does not count
        progress(f"round {number + 1} of {repeats}")
        plain, _ = prompt(tokens(SYSTEM_TOKENS))
        measured = [(times, first_token_ms(plain, chunk_cache=False)) for times in peers.values()]
        for (policy, ratio), columns in ours.items():
            for system, times in zip((known_system, tokens(SYSTEM_TOKENS)), columns.values(), strict=True):
                ids, boundaries = prompt(system)
                took = first_token_ms(ids, boundaries=boundaries, policy=policy, recompute_ratio=ratio)
                measured.append((times, took))
        if number >= 0:
            for times, took in measured:
                times.append(took)
    requests = 2 * len(cases) * (repeats + 1)
    stats = llm.get_stats()
    assert stats["hits_by_tier"][tier] == (requests - 1) * len(documents), f"not every chunk came from {tier}"
    base = {name: statistics.median(times) for name, times in peers.items()}
    rows = []
    for (policy, ratio), columns in ours.items():
        mine = {name: statistics.median(times) for name, times in columns.items()}
        rows.append(
            {
                "context": context,
                "layers": layers,
                "tier": tier,
                "eager": eager,
                "policy": policy,
                "ratio": ratio,
                **base,
                **mine,
                "speedup": base["full_ms"] / mine["reuse_ms"],
                "against_prefix_hit": mine["reuse_ms"] / base["prefix_hit_ms"],
            }
        )
    return {"vllm": vllm_version, "rows": rows}
