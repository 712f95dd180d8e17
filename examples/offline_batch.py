"""Many questions about the same documents, without a server: `vllm.LLM` with a chunk cache."""

import os

from library import BAKERY, FERRY, MUSEUM
from vllm import SamplingParams

from kvmosaic.vllm import LLM

QUESTIONS = ("When does the ferry leave Port Almery?", "Who owns the bakery?", "When is the museum open?")

if __name__ == "__main__":  # vLLM starts processes
    llm = LLM(
        os.environ.get("MODEL", "smollm2-135m"), enable_chunk_cache=True, max_model_len=2048, enforce_eager=True
    )
    orders = ((FERRY, BAKERY, MUSEUM), (MUSEUM, FERRY, BAKERY), (BAKERY, MUSEUM, FERRY))
    for documents, question in zip(orders, QUESTIONS, strict=True):
        prompt = "\n\n".join([*documents, question])
        [output] = llm.generate(prompt, SamplingParams(max_tokens=32), documents=list(documents), use_tqdm=False)
        print(output.outputs[0].text.strip())
        print(f"cached {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens")
