"""Every way in which vLLM runs a model gives the embedded engine's results in fp32, within the rounding of its own
dtype."""

import random
from itertools import product

import pytest
import torch
from transformers import LlamaForCausalLM

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import greedy, join
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import VOCABULARY

pytestmark = pytest.mark.engine

RATIOS = [0.0, 0.1, 0.4, 1.0, None]
MODES = (
    list(product(["V1", "V2"], [True, False], ["FLASH_ATTN", "TRITON_ATTN"]))
    if torch.cuda.is_available()
    else [("V1", True, None)]
)
"""Cases: runner, whether eager, backend."""


def draw_prompts(count, chance):
    """Documents that recur at other positions."""

    def draw(shortest, longest):
        return [chance.randrange(10, VOCABULARY) for _ in range(chance.randint(shortest, longest))]

    documents = [draw(40, 200) for _ in range(6)]
    return [join([draw(5, 50), *chance.sample(documents, 4), draw(5, 50)]) for _ in range(count)]


@pytest.fixture(scope="module")
def case(tiny_llama):
    """A model, prompts, the results of the embedded engine, and the effect of bfloat16 on the results of
    transformers."""
    engine = HFEngine(
        LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32),
        enable_chunk_cache=True,
        miss_policy="fill-first",
        policy="sink-link",
    )
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    prompts, said = draw_prompts(4, random.Random(seed)), []
    for ids, boundaries in prompts:
        parsed = ChunkedPrompt(tuple(ids), tuple(Span(*each) for each in boundaries[1:-1]))
        with engine.engine.session():
            logits = [engine.assemble(parsed, 1.0 if ratio is None else ratio).logits for ratio in RATIOS]
        said.append(torch.stack(logits).log_softmax(-1))
    wanted = torch.stack(said)
    if not torch.cuda.is_available():
        return prompts, wanted, None  # all is in float32
    rounded = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = [rounded(torch.tensor([ids])).logits[0, -1] for ids, _ in prompts]
    return prompts, wanted, float(rms(torch.stack(logits).float().log_softmax(-1) - wanted[:, -1]).max())


def rms(difference):
    return difference.square().mean(-1).sqrt()


def first_tokens(llm, prompts):
    """Log-probabilities ``[prompts, ratios, vocabulary]`` of the first token of every prompt ``(ids, boundaries)``,
    for every ratio and without the cache (``None``), and the numbers of cached tokens."""
    said, cached = [], []
    for ids, boundaries in prompts:
        said.append([])
        for ratio in RATIOS:
            params = {"chunk_cache": False} if ratio is None else {"boundaries": boundaries, "recompute_ratio": ratio}
            assert llm.reset_prefix_cache()
            sampling = greedy(2, detokenize=False, logprobs=VOCABULARY, params=params)
            [output] = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
            seen = output.outputs[0].logprobs[0]
            said[-1].append([seen[token].logprob for token in range(VOCABULARY)])
            cached.append(output.num_cached_tokens)
    return said, cached


@pytest.mark.parametrize(("runner", "eager", "backend"), MODES)
def test_first_tokens_are_those_of_the_embedded_engine(case, tiny_llama, monkeypatch, runner, eager, backend):
    prompts, wanted, rounding = case
    settings, tolerance = {"enforce_eager": eager}, 1e-4
    if backend is not None:
        settings |= {"attention_backend": backend, "dtype": "bfloat16"}
        tolerance = 2 * rounding
    settings |= {"skip_tokenizer_init": True, "max_logprobs": VOCABULARY, "policy": "sink-link"}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    with EngineApart(tiny_llama, miss_policy="fill-first", **settings) as engine:
        said, cached = engine.call(first_tokens, prompts)
    error = rms(torch.tensor(said) - wanted)
    print(f"{runner} eager={eager} {backend}: errors {error.amax(0).tolist()}, allowed {tolerance}")
    assert (error <= tolerance).all(), error
    assert sum(count > 0 for count in cached) >= 3 * (len(prompts) - 1)  # the first fills
    # Otherwise any result would pass. Reuse changes answers by far more than rounding does.
    print(f"reused as it is: {rms(wanted[:, 0] - wanted[:, -1]).tolist()}")
    assert (rms(wanted[:, 0] - wanted[:, -1]) > 3 * tolerance).all()
