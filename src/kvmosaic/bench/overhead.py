"""What the chunk cache costs requests that have no chunks: vLLM's step time with it and without it.

Each engine runs in a process of its own, by turns, because vLLM keeps its connector in a global. The model has the
shape of ``bench ttft``'s, with random weights.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmosaic.bench.ttft import SHAPE
from kvmosaic.core.errors import KvmosaicError

REQUESTS = 8
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
REPEATS = 7


def run(layers: int, turns: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Median milliseconds of a decode step, and of prefilling a batch, of both engines in ``turns`` turns each."""
    times: dict[str, list[dict[str, float]]] = {"plain": [], "chunk_cache": []}
    for turn in range(turns):
        for engine, results in times.items():
            progress(f"turn {turn + 1} of {turns}: {engine}")
            results.append(_in_a_process(engine, layers))
    rows = []
    for step in ("decode_step_ms", "prefill_ms"):
        medians = {engine: statistics.median(result[step] for result in results) for engine, results in times.items()}
        rows.append({"step": step, **medians, "overhead": medians["chunk_cache"] / medians["plain"] - 1})
    return {"rows": rows}


def _in_a_process(engine: str, layers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "kvmosaic.bench.overhead", engine, str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("TIMES "):
            result: dict[str, float] = json.loads(line.removeprefix("TIMES "))
            return result
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    raise KvmosaicError(f"the {engine} engine did not run: {last}")


def _measure(engine: str, layers: int) -> dict[str, float]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import SamplingParams

    from kvmosaic.vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        llm = LLM(
            folder,
            enable_chunk_cache=engine == "chunk_cache",
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=4096,
            gpu_memory_utilization=0.7,
            enable_prefix_caching=True,
        )

    def seconds(outputs: int, salt: int) -> float:
        prompts = [
            {
                "prompt_token_ids": [
                    1000 + (salt * 7919 + request * 104729 + i * 31) % 90000 for i in range(PROMPT_TOKENS)
                ]
            }
            for request in range(REQUESTS)
        ]
        sampling = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(OUTPUT_TOKENS, salt=0)
    prefill = [seconds(1, salt=2 * number + 1) for number in range(REPEATS)]
    whole = [seconds(OUTPUT_TOKENS, salt=2 * number + 2) for number in range(REPEATS)]
    first = statistics.median(prefill)
    decode = (statistics.median(whole) - first) / (OUTPUT_TOKENS - 1)
    return {"prefill_ms": first * 1e3, "decode_step_ms": decode * 1e3}


if __name__ == "__main__":
    print("TIMES " + json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
