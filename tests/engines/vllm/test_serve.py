"""``kvmosaic serve`` as users meet it: a server process, and the OpenAI client."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from openai import OpenAI

from tests.engines.vllm.test_engine import DOCUMENTS, prompt

OPTIONS = "--dtype float32 --enforce-eager --max-model-len 1024 --enable-prompt-tokens-details"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "kvmosaic.cli.main", "serve", "smollm2-135m", "--enable-chunk-cache"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *OPTIONS.split(), "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
    finally:
        server.terminate()
        server.wait(60)


def complete(client, text, **params):
    model = client.models.list().data[0].id
    return client.completions.create(
        model=model,
        prompt=text,
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "kv_transfer_params": params} if params else {"ignore_eos": True},
    )


def test_second_request_reports_its_documents_as_cached(client):
    complete(client, prompt("You are helpful.", DOCUMENTS))
    second = complete(client, prompt("Quite another system prompt.", DOCUMENTS[::-1]))
    usage = second.usage
    fresh = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens > 80
    assert fresh < 20  # the question alone; the system prompt is computed with the chunks


def test_ratio_one_is_plain_vllm(client):
    text = prompt("Be brief.", DOCUMENTS)
    exact = complete(client, text, recompute_ratio=1.0).choices[0]
    plain = complete(client, text, chunk_cache=False).choices[0]
    assert exact.text == plain.text
    assert exact.logprobs.token_logprobs == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
