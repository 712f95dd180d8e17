"""The catalog's small models, really pulled."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmosaic.models import CATALOG, installed, pull, resolve

BOTH = ["smollm2-135m", pytest.param("gemma-3-270m", marks=pytest.mark.long)]
TEXTS = ["The capital of France is", "Grüße, 日本! 🙂\n\n  x = 12_345;\t# done"]


@dataclass(frozen=True)
class Loaded:
    tokenizer: Any
    model: Any

    def greedy(self, prompt: Any, new_tokens: int) -> str:
        output = self.model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)
        return self.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def load(folder: Path) -> Loaded:
    return Loaded(AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture(scope="module")
def smollm2_loaded(smollm2: Path) -> Loaded:
    return load(smollm2)


@pytest.fixture(scope="module")
def gemma_loaded(gemma: Path) -> Loaded:
    return load(gemma)


def test_smollm2_knows_the_capital_of_france(smollm2_loaded: Loaded) -> None:
    prompt = smollm2_loaded.tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in smollm2_loaded.greedy(prompt, new_tokens=5)


def test_smollm2_answers_a_chat_and_stops(smollm2_loaded: Loaded) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2_loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert smollm2_loaded.greedy(prompt, new_tokens=30) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("name", BOTH)
def test_weights_are_float32_and_all_there(name: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue({"smollm2-135m": "smollm2_loaded", "gemma-3-270m": "gemma_loaded"}[name])
    assert loaded.model.dtype == torch.float32
    assert loaded.model.num_parameters() == CATALOG[name].params


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokenizer_round_trip(smollm2_loaded: Loaded, text: str) -> None:
    tokenizer = smollm2_loaded.tokenizer
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id not in ids  # this model was trained without it


def test_smollm2_tokenizer_keeps_blank_lines_before_a_digit_whole(smollm2_loaded: Loaded) -> None:
    assert smollm2_loaded.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]


@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
def test_gemma_tokenizer_prepends_bos_exactly_once(gemma_loaded: Loaded, text: str) -> None:
    tokenizer = gemma_loaded.tokenizer
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert ids.count(2) == 1
    assert ids[1:] == tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.long
def test_gemma_writes_sense(gemma_loaded: Loaded) -> None:
    prompt = gemma_loaded.tokenizer("The capital of France is", return_tensors="pt")
    assert gemma_loaded.greedy(prompt, new_tokens=6) == " the capital of the country of"


@pytest.mark.parametrize("name", BOTH)
def test_folders_are_ordinary_and_found(name: str) -> None:
    folder = pull(name)
    assert installed()[name] == folder
    assert resolve(name) == str(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_pulling_again_does_nothing(smollm2: Path) -> None:
    said: list[str] = []
    before = (smollm2 / "model.safetensors").stat()
    assert pull("smollm2-135m", said.append) == smollm2
    assert said == []
    assert (smollm2 / "model.safetensors").stat() == before
