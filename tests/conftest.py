"""Shared fixtures: the real small model and its tokenizer."""

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available() and find_spec("vllm") is None:
    # Our kernels run in Triton's interpreter, which has to be known before anything imports Triton; vLLM's must not.
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.models import resolve

# Most tests want a document in the store after the first request that has it, and say what else they want.
os.environ.setdefault("KVMOSAIC_MISS_POLICY", "fill-first")


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory):
    """The profiles of whoever runs the tests must not change what engines do; also in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture(scope="session")
def smollm2_folder():
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder):
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder):
    return AutoModelForCausalLM.from_pretrained(smollm2_folder).eval()
