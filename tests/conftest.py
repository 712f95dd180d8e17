"""Shared fixtures: the real small model and its tokenizer."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.models import resolve


@pytest.fixture(scope="session")
def smollm2_folder():
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder):
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder):
    return AutoModelForCausalLM.from_pretrained(smollm2_folder).eval()
