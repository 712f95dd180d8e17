"""Every way in which vLLM runs a model gives what the embedded engine gives in fp32, within the rounding of its own
type."""

import json
import os
import random
import subprocess
import sys
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.tiny import VOCABULARY, write_tiny_llama

RATIOS = [0.0, 0.1, 0.4, 1.0, None]
MODES = (
    list(product(["V1", "V2"], [True, False], ["FLASH_ATTN", "TRITON_ATTN"]))
    if torch.cuda.is_available()
    else [("V1", True, None)]
)
"""Runner, whether eager, backend."""


def draw_prompts(count, chance):
    """Documents that come again, at other places."""

    def draw(shortest, longest):
        return [chance.randrange(10, VOCABULARY) for _ in range(chance.randint(shortest, longest))]

    documents, prompts = [draw(40, 200) for _ in range(6)], []
    for _ in range(count):
        ids, boundaries = [], []
        for part in (draw(5, 50), *chance.sample(documents, 4), draw(5, 50)):
            boundaries.append((len(ids), len(ids) + len(part)))
            ids += part
        prompts.append((ids, boundaries))
    return prompts


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A model, prompts, what the embedded engine says, and by how much bfloat16 changes what transformers says."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")
    engine = HFEngine(
        LlamaForCausalLM.from_pretrained(model, dtype=torch.float32), enable_chunk_cache=True, policy="sink-link"
    )
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    prompts, said = draw_prompts(4, random.Random(seed)), []
    for ids, boundaries in prompts:
        parsed = ChunkedPrompt(tuple(ids), tuple(Span(*each) for each in boundaries[1:-1]))
        with engine.engine.session():
            logits = [engine.assemble(parsed, 1.0 if ratio is None else ratio).logits for ratio in RATIOS]
        said.append(torch.stack(logits).log_softmax(-1))
    rounded = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = [rounded(torch.tensor([ids])).logits[0, -1] for ids, _ in prompts]
    wanted = torch.stack(said)
    return model, prompts, wanted, float(rms(torch.stack(logits).float().log_softmax(-1) - wanted[:, -1]).max())


def rms(difference):
    return difference.square().mean(-1).sqrt()


@pytest.mark.parametrize(("runner", "eager", "backend"), MODES)
def test_first_tokens_are_those_of_the_embedded_engine(case, runner, eager, backend):
    model, prompts, wanted, rounding = case
    settings, tolerance = {"enforce_eager": eager}, 1e-4
    if backend is not None:
        settings |= {"attention_backend": backend, "dtype": "bfloat16"}
        tolerance = 2 * rounding
    arguments = {"model": model, "prompts": prompts, "ratios": RATIOS, "settings": settings}
    command = [sys.executable, "-m", "tests.engines.vllm.runner_run", json.dumps(arguments)]
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2")),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    error = rms(torch.tensor(result["said"]) - wanted)
    print(f"{runner} eager={eager} {backend}: errors {error.amax(0).tolist()}, allowed {tolerance}")
    assert (error <= tolerance).all(), error
    assert sum(count > 0 for count in result["cached"]) >= 3 * (len(prompts) - 1)  # the first fills
    # Or anything would do: what is reused changes answers by far more than rounding does.
    print(f"reused as it is: {rms(wanted[:, 0] - wanted[:, -1]).tolist()}")
    assert (rms(wanted[:, 0] - wanted[:, -1]) > 3 * tolerance).all()
