"""Run as a program by ``test_engine_crash.py``: one engine, to be killed. Arguments: model, settings as JSON.

Prints ``READY``, then for each line it reads, ``[prompt, salt]`` as JSON, one line: the answer's tokens, how many of
the prompt's were cached, failed writes. By then all is in the pool, and vLLM's own prefix cache is empty again."""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that one signal kills all of it

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_prefix_blocks import ask


def main(model: str, settings: dict) -> None:
    llm = LLM(model, enable_chunk_cache=True, prefix_blocks=True, skip_tokenizer_init=True, **SMALL | settings)
    store = get_kv_transfer_group().loader.cache.store
    print("READY", flush=True)
    for line in sys.stdin:
        prompt, salt = json.loads(line)
        [output] = ask(llm, prompt, salt=salt)
        ask(llm, [5, 6, 7])  # with its step the last parts are stored
        assert llm.reset_prefix_cache()
        store.flush()
        said = {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "write_errors": store.get_stats()["write_errors"],
        }
        print("SAID " + json.dumps(said), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
