"""Images together with other features: a quantised KV cache, LoRA adapters."""

from typing import Any

import pytest
import torch

from tests.engines.vllm.helpers import draw, exact, greedy, measure_nothing, near, start, statuses, worker_side
from tests.engines.vllm.test_lora import ADAPTERS, write_adapters
from tests.engines.vllm.vision import SETTINGS, ask, boundaries, forget, picture, prompt, write

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="never tried on GPUs"),
]

FP8 = {"kv_cache_dtype": "fp8"}
has_fp8 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has no fp8 KV cache here")


def layouts() -> list[tuple[list[Any], tuple[int, ...]]]:
    """Prompts of a system prompt, documents, images and a question: the second has those of the first in another
    order, behind another system prompt."""
    text, other, image, second = draw(50), draw(33), picture(), picture()
    return [
        ([draw(40), text, image, other, second, draw(20)], (1, 3)),
        ([draw(9), second, other, image, text, draw(20)], (2, 4)),
    ]


def answers(llm: Any, family: str, prompts: list[Any], **given: Any) -> dict[str, Any]:
    """Answers to two prompts about the same images and documents, with what was reused. The second one also
    recomputed in parts, as a whole, and by vLLM alone."""
    (first, chunks), (second, again) = prompts
    forget(llm, stored=True)
    filled = ask(llm, family, *first, chunks=chunks, **given)
    forget(llm)
    moved = ask(llm, family, *second, chunks=again, **given)
    result: dict[str, Any] = {"filled": exact(filled), "moved": exact(moved)}
    result["statuses"] = [*statuses(filled), *statuses(moved)]
    for name, params in {
        "asked": {"recompute_ratio": 0.5, "policy": "query-attention(layers=1)"},
        "checked": {"recompute_ratio": 0.8, "policy": "kv-deviation(layers=1)"},
        "all": {"recompute_ratio": 1.0},
        "plain": {"chunk_cache": False},
    }.items():
        forget(llm)
        result[name] = exact(ask(llm, family, *second, chunks=again if name != "plain" else (), **params, **given))
    return result


def check(result: dict[str, Any]) -> None:
    """Check that all chunks were reused, and that ratio 1.0 is a full prefill."""
    assert result["statuses"] == ["filled"] * 4 + ["cached"] * 4
    near(result["all"], result["plain"])
    with pytest.raises(AssertionError):
        near(result["moved"], result["plain"])  # reuse is an approximation, which these comparisons notice


def batch(llm: Any, family: str, prompts: list[Any], adapters: list[Any]) -> tuple[list[Any], list[Any]]:
    """Answers to requests of several kinds, with any of the ``adapters``, that are sent one after the other, and
    together."""
    asked = [
        (parts, chunks, params, which)
        for parts, chunks in prompts
        for params in ({"recompute_ratio": 0.0}, {"recompute_ratio": 1.0}, {"chunk_cache": False})
        for which in adapters
    ]
    alone = []
    for parts, chunks, params, which in asked:
        own = chunks if "recompute_ratio" in params else ()
        alone.append(exact(ask(llm, family, *parts, chunks=own, adapter=which, **params)))
        forget(llm)
    given, sampling = [], []
    for parts, chunks, params, _ in asked:
        tokens, places = prompt(family, *parts)
        given.append(tokens)
        own = params | {"boundaries": boundaries(places, chunks)} if "recompute_ratio" in params else params
        sampling.append(greedy(8, logprobs=3, detokenize=False, params=own))
    whose = [which for *_, which in asked]
    outputs = llm.generate(given, sampling, lora_request=whose if any(whose) else None, use_tqdm=False)
    return alone, [exact(output) for output in outputs]


@has_fp8
@pytest.mark.parametrize("family", ["paddle", "idefics"])
def test_a_quantised_cache(family, tmp_path, monkeypatch):
    llm = start(write(family, tmp_path), **SETTINGS, **FP8)
    measure_nothing(monkeypatch)
    assert worker_side().off_reason is None
    assert worker_side().forward.kv.is_quantised
    prompts = layouts()
    check(answers(llm, family, prompts))
    for separate, joined in zip(*batch(llm, family, prompts, [None]), strict=True):
        near(joined, separate)


def test_adapters(tmp_path, monkeypatch):
    """An adapter changes the language model alone, so an image is encoded once for all adapters."""
    family = "idefics"
    adapters = write_adapters(tmp_path, parts={"q_proj": (128, 128), "v_proj": (128, 64)}, model="model.text_model")
    llm = start(write(family, tmp_path / "model"), **SETTINGS, **ADAPTERS, max_loras=3)
    measure_nothing(monkeypatch)
    whose, prompts = [None, *adapters[:2]], layouts()
    for which in adapters[:2]:
        ask(llm, family, [11, 12, 13], adapter=which)  # the first request has the adapter loaded
    results = [answers(llm, family, prompts, adapter=which) for which in whose]
    for result in results:
        check(result)
    for name in ("moved", "plain"):
        assert len({str(result[name]) for result in results}) == len(whose), "the adapters change nothing"
    for separate, joined in zip(*batch(llm, family, prompts, whose), strict=True):
        near(joined, separate)
