"""What tests of images share: prompts with images, and what an engine does with them."""

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engines.vllm import tiny_vision
from tests.engines.vllm.helpers import greedy, worker_side

FAMILIES = ["paddle", "idefics", *(["qwen2", "qwen25"] if find_spec("torchvision") else [])]
"""Tiny models; vLLM imports some only where there is torchvision."""
WITH_AXES = {"paddle", "qwen2", "qwen25"}
"""Models with M-RoPE: an image of 5 × 4 tokens is as far as 5 tokens of text."""
WIDTH, HEIGHT = 140, 112
"""Pixels of an image."""
TOKENS = {"paddle": 20, "idefics": 31, "qwen2": 20, "qwen25": 20}
"""Tokens of an image: 5 × 4, or 5 tiles of 4 with text between."""
SETTINGS: dict[str, Any] = {
    "miss_policy": "fill-first",
    "chunk_sources": "images",
    "chunk_separator": "",
    "limit_mm_per_prompt": {"image": 4, "video": 0},
}
"""Settings of these engines."""
Part = list[int] | Image.Image


def write(family: str, folder: Any) -> str:
    """The tiny model of a family."""
    path: str = getattr(tiny_vision, f"write_tiny_{family}")(folder)
    return path


def forget(llm: Any, stored: bool = False) -> None:
    """Empty all caches of vLLM's own, and ours if ``stored``."""
    assert llm.reset_prefix_cache(reset_connector=stored)
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def picture() -> Image.Image:
    """An image of noise. Its numbers come from the test's seed."""
    numbers = np.random.default_rng(random.randrange(2**32)).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def prompt(family: str, *parts: Part) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """A prompt, and where each part is in it once vLLM has put placeholders for all tokens of images."""
    tokens: list[int] = []
    places, at = [], 0
    for part in parts:
        length = len(part) if isinstance(part, list) else TOKENS[family]
        tokens += part if isinstance(part, list) else [tiny_vision.IMAGE]
        places.append((at, at + length))
        at += length
    images = [part for part in parts if not isinstance(part, list)]
    return {"prompt_token_ids": tokens} | ({"multi_modal_data": {"image": images}} if images else {}), places


def boundaries(places: list[tuple[int, int]], chunks: tuple[int, ...]) -> list[tuple[int, int]]:
    """What a request says of parts that are ``chunks``, by index."""
    return [(0, places[chunks[0]][0]), *(places[index] for index in chunks), (places[chunks[-1]][1], places[-1][1])]


def ask(
    llm: Any,
    family: str,
    *parts: Part,
    chunks: tuple[int, ...] = (),
    uuids: list[str] | None = None,
    salt: str | None = None,
    adapter: Any = None,
    **params: Any,
) -> Any:
    """The answer to a prompt of which ``chunks``, by index, are chunks, besides images. ``adapter``: vLLM's
    ``LoRARequest``."""
    given, places = prompt(family, *parts)
    if uuids is not None:
        given["multi_modal_uuids"] = {"image": uuids}
    if salt is not None:
        given["cache_salt"] = salt
    if chunks:
        params["boundaries"] = boundaries(places, chunks)
    sampling = greedy(8, logprobs=3, detokenize=False, params={"report": True, **params})
    [output] = llm.generate([given], sampling, lora_request=adapter, use_tqdm=False)
    assert len(output.prompt_token_ids) == places[-1][1]
    return output


def plain(llm: Any, family: str, *parts: Part) -> Any:
    """The answer of vLLM alone, with nothing from its caches."""
    forget(llm)
    output = ask(llm, family, *parts, chunk_cache=False)
    forget(llm)
    return output


def note_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each run of the encoder encodes from now on, ours and vLLM's."""
    model = worker_side().forward._runner.get_model()
    counts: list[int] = []
    encode = model.embed_multimodal

    def noting(**given: Any) -> Any:
        outputs = encode(**given)
        counts.append(len(outputs))
        return outputs

    monkeypatch.setattr(model, "embed_multimodal", noting)
    return counts
