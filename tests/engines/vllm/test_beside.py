"""Reuse together with other features of vLLM: structured output, several engines behind one server."""

import re

import httpx
import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.engines.vllm.helpers import (
    DOCUMENTS,
    greedy,
    report,
    start,
)
from tests.engines.vllm.server import serving

pytestmark = pytest.mark.engine


def test_structured_output(tiny_text):
    llm = start(tiny_text, miss_policy="fill-first", chunk_separator=None)
    prompts = ["\n\n".join([*order, "Is it open?"]) for order in (DOCUMENTS, DOCUMENTS[::-1])]
    for text in prompts:
        sampling = greedy(
            8, params={"report": True}, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        )
        sampling.ignore_eos = False
        [answer] = llm.generate(text, sampling, documents=DOCUMENTS, use_tqdm=False)
        assert answer.outputs[0].text in ("yes", "no")
    assert report(answer)["reused_tokens"] > 0


@pytest.mark.long
def test_two_engines_behind_one_server(tmp_path):
    """Each engine has its own store, and requests go to either."""
    options = "--max-model-len 1024 --data-parallel-size 2 --client-parameters all"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "KVMOSAIC_MISS_POLICY": "fill-first"}
    parts = [{"type": "text", "text": text * 4} for text in (*DOCUMENTS, "Who owns the bakery?")]
    with serving("smollm2-135m", tmp_path / "log", *options.split(), **environment) as url:
        body = {"model": "smollm2-135m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
        reused = []
        for turn in range(8):
            parts[:4] = parts[1:4] + parts[:1]
            headers = {"x-kvmosaic": "report"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
            assert answer.status_code == 200, (turn, answer.text)
            reused.append(int(re.search(r"reused_tokens\D+(\d+)", answer.headers["x-kvmosaic"])[1]))
        assert sum(count > 0 for count in reused) >= 4, reused
