"""``python -m tests.ascend_report MODEL``: whether the chunk cache is exact on an Ascend NPU, and how fast. Prints a
report to send back, which is also written to ``ascend-report.txt``.

kvmosaic was never run on an NPU. The script also works on other machines, where it is tested.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvmosaic", "vllm", "vllm-ascend", "torch", "torch-npu", "triton-ascend", "transformers")
LENGTHS = (37, 150, 256, 300)
"""Tokens of the documents: some fill blocks of 128 tokens, some do not."""
CASES = ((1.0, "composite"), (0.0, "none"), (0.15, "composite"), (0.15, "kv-deviation(layers=1)"))
"""Ratios and policies that are compared with plain vLLM. Only the first has to be exact."""
RESULT = "ASCEND-REPORT "
"""Prefix of lines with results; vLLM writes to the same output."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a small dense model with ordinary attention, like Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--only-exactness", action="store_true", help="one part of the report, in this process")
    parser.add_argument("--context", default="8192", help="tokens of the benchmark's prompts")
    parser.add_argument("--layers", default="32", help="layers of the benchmark's model, which has random weights")
    given = parser.parse_args()
    if given.only_exactness:
        for line in exactness(given.model):
            print(RESULT + json.dumps(line), flush=True)
        return
    command = [sys.executable, "-m", "kvmosaic.cli.main"]
    bench = ["bench", "ttft", "--tier", "host", "--context", given.context, "--layers", given.layers]
    parts = {
        "versions": "\n".join(versions()),
        "doctor": ran([*command, "doctor", given.model, "--json"]),
        "exactness": ran([sys.executable, "-m", "tests.ascend_report", given.model, "--only-exactness"]),
        "benchmark": ran([*command, *bench, "--ratios", "0,0.15", "--json"]),
    }
    text = "\n\n".join(f"== {name}\n{part}" for name, part in parts.items())
    Path("ascend-report.txt").write_text(text + "\n")
    print(text)


def versions() -> Iterator[str]:
    """The machine and its software: one line each."""
    yield f"Python {platform.python_version()}, {platform.machine()}"
    installed = {each.name: each.version for each in metadata.distributions()}
    yield from (f"{name} {installed.get(name, 'is not installed')}" for name in PACKAGES)
    yield f"CANN {os.environ.get('ASCEND_TOOLKIT_HOME', 'not found')}"


def ran(command: Sequence[str]) -> str:
    """Results that a command prints, or the end of its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    results = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode:
        results += [f"status {done.returncode}; the end of its output:", *done.stdout.splitlines()[-60:]]
    return "\n".join(results) if results else done.stdout.strip()


def exactness(model: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """The result of the start-up self-test, and a comparison of each case with plain vLLM: the tokens of both, and
    the difference of their first token's log-probabilities. ``settings`` are vLLM's and the chunk cache's."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import SamplingParams

    from kvmosaic.vllm import LLM

    ours = {"client_parameters": "all", "min_chunk_tokens": 1, "miss_policy": "fill-first", "max_model_len": 2048}
    llm = LLM(model, enable_chunk_cache=True, **ours | settings)
    yield {"self-test": llm.get_stats()["off_reason"] or "passed"}
    most = llm.llm_engine.vllm_config.model_config.get_vocab_size() - 1
    chosen = random.Random(0)

    def draw(count: int) -> list[int]:
        return [chosen.randrange(10, most) for _ in range(count)]

    def ask(tokens: list[int], **params: Any) -> Any:
        extra = {"kv_transfer_params": {"report": True, **params}}
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5, extra_args=extra)
        sampling.detokenize = False
        [output] = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
        return output

    documents = [draw(length) for length in LENGTHS]
    for ratio, policy in CASES:
        chosen.shuffle(documents)
        parts = [draw(21), *documents, draw(13)]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
        tokens = [token for part in parts for token in part]
        llm.reset_prefix_cache()
        plain = ask(tokens, chunk_cache=False)
        llm.reset_prefix_cache()
        reused = ask(
            tokens,
            boundaries=list(zip([0, *ends], ends, strict=False)),
            recompute_ratio=ratio,
            policy=policy,
        )
        yield {
            "ratio": ratio,
            "policy": policy,
            "same tokens": plain.outputs[0].token_ids == reused.outputs[0].token_ids,
            "largest difference": round(_distance(plain, reused), 5),
            "mode": reused.kv_transfer_params["mode"],
            "chunks": [chunk["status"] for chunk in reused.kv_transfer_params["chunks"]],
        }


def _distance(plain: Any, reused: Any) -> float:
    """Maximum difference of the log-probabilities of the first answer token, over the tokens that both list."""
    mine, theirs = (output.outputs[0].logprobs[0] for output in (reused, plain))
    return max(
        (abs(mine[token].logprob - theirs[token].logprob) for token in mine.keys() & theirs.keys()), default=99
    )


if __name__ == "__main__":
    main()
