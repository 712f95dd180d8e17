"""One engine in a process of its own: ``python -m tests.engines.vllm.runner_run JSON`` prints what it says first."""

import json
import sys

from vllm import SamplingParams

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.tiny import VOCABULARY


def run(model, prompts, ratios, settings):
    """Of every prompt ``(ids, boundaries)``, for every ratio and without the cache (``None``): log-probabilities
    ``[prompts, ratios, vocabulary]`` of the first token, and cached tokens."""
    from kvmosaic.vllm import LLM

    every = {
        "skip_tokenizer_init": True,
        "max_logprobs": VOCABULARY,
        "miss_policy": "fill-first",
        "policy": "sink-link",
    }
    llm = LLM(model, enable_chunk_cache=True, **SMALL | every | settings)
    said, cached = [], []
    for ids, boundaries in prompts:
        said.append([])
        for ratio in ratios:
            params = {"chunk_cache": False} if ratio is None else {"boundaries": boundaries, "recompute_ratio": ratio}
            sampling = SamplingParams(
                max_tokens=2,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                logprobs=VOCABULARY,
                extra_args={"kv_transfer_params": params},
            )
            assert llm.reset_prefix_cache()
            [output] = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
            seen = output.outputs[0].logprobs[0]
            said[-1].append([seen[token].logprob for token in range(VOCABULARY)])
            cached.append(output.num_cached_tokens)
    return {"said": said, "cached": cached}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
