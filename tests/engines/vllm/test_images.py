"""Prompts with images, in a model with M-RoPE and in one without: images and text beside them are reused."""

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvmosaic.engines.vllm import support
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.messages import Images
from tests.engines.vllm import tiny_vision
from tests.engines.vllm.helpers import (
    draw,
    greedy,
    measure_nothing,
    note_placed,
    report,
    same,
    scheduler_side,
    set_miss_policy,
    start,
    statuses,
    waiting_fills,
    worker_side,
)

pytestmark = pytest.mark.engine

FAMILIES = ["paddle", "llava", "qwen"]
WIDTH, HEIGHT = 140, 112
"""Pixels of an image: 5 × 4 tokens, or 16 in a model that resizes all images."""
TOKENS = {"llava": 16, "paddle": 20, "qwen": 20}
READ = (
    "LlavaForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
)
"""Models whose images are read here, whether or not they are elsewhere."""
LIMIT = {"image": 4, "video": 0}
Part = list[int] | Image.Image


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    if request.param != "paddle" and not importlib.util.find_spec("torchvision"):
        pytest.skip("vLLM needs torchvision for this model")
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    write = getattr(tiny_vision, f"write_tiny_{family}")
    return write(tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def engine(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "READS_IMAGES", READ)
        return start(
            folder, miss_policy="fill-first", chunk_sources="images", limit_mm_per_prompt={"image": 4, "video": 0}
        )


@pytest.fixture
def llm(engine, monkeypatch):
    """With nothing stored, and nothing in vLLM's own caches."""
    forget(engine)
    worker_side().clear()
    measure_nothing(monkeypatch)
    return engine


def forget(llm):
    """Empty all caches of vLLM's own."""
    assert llm.reset_prefix_cache()
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


def ask(llm, family, *parts, chunks=(), uuids=None, **params):
    """The answer to a prompt of which ``chunks``, by index, are chunks, besides images."""
    given, places = prompt(family, *parts)
    if uuids is not None:
        given["multi_modal_uuids"] = {"image": uuids}
    if chunks:
        edges = [(0, places[chunks[0]][0]), *(places[index] for index in chunks)]
        params["boundaries"] = [*edges, (places[chunks[-1]][1], places[-1][1])]
    sampling = greedy(8, logprobs=3, detokenize=False, params={"report": True, **params})
    [output] = llm.generate([given], sampling, use_tqdm=False)
    assert len(output.prompt_token_ids) == places[-1][1]
    return output


def plain(llm, family, *parts):
    """The answer of vLLM alone, with nothing from its caches."""
    forget(llm)
    output = ask(llm, family, *parts, chunk_cache=False)
    forget(llm)
    return output


def note_encoded(monkeypatch) -> list[int]:
    """How many images each run of the encoder encodes from now on, ours and vLLM's."""
    model = worker_side().forward._runner.get_model()
    counts: list[int] = []
    encode = model.embed_multimodal

    def noting(**given):
        outputs = encode(**given)
        counts.append(len(outputs))
        return outputs

    monkeypatch.setattr(model, "embed_multimodal", noting)
    return counts


def test_two_images_in_the_same_text_never_share_kv(llm, family):
    system, document, question = draw(40), draw(50), draw(30)
    first, second = picture(), picture()

    def answers(image):
        return ask(llm, family, system, image, document, question, chunks=(2,))

    alone = []
    for image in (first, second):
        forget(llm)
        worker_side().clear()
        alone.append(answers(image))
    with pytest.raises(AssertionError):
        same(*alone)  # answers depend on images
    forget(llm)
    worker_side().clear()
    for _ in range(2):  # the second time from vLLM's prefix cache
        for image, expected in zip((first, second), alone, strict=True):
            same(answers(image), expected)


def test_everything_recomputed_is_exact(llm, family):
    """Documents and images in any order, found or filled, at other positions than before."""
    texts, images = [draw(random.randint(20, 60)) for _ in range(3)], [picture(), picture()]
    layouts = [
        ([draw(40), texts[0], images[0], texts[1], draw(20)], (1, 3)),
        ([draw(7), images[0], texts[1], images[1], texts[0], draw(20)], (2, 4)),
        ([images[1], draw(33), images[0], texts[2], draw(20)], (3,)),
        ([draw(9), texts[2], images[0], draw(25)], (1,)),
        ([draw(70), images[0], images[1], draw(12)], ()),
    ]
    for parts, chunks in layouts:
        theirs = plain(llm, family, *parts)
        ours = ask(llm, family, *parts, chunks=chunks, recompute_ratio=1.0)
        same(ours, theirs)
        assert report(ours)["mode"] in ("fill", "reuse")
        assert len(report(ours)["chunks"]) == len(chunks) + sum(not isinstance(part, list) for part in parts)


def test_an_image_is_found_at_another_position_and_not_encoded_again(llm, family, monkeypatch):
    image, document = picture(), draw(40)
    assert statuses(ask(llm, family, draw(30), image, document, draw(10), chunks=(2,))) == ["filled", "filled"]
    forget(llm)
    encoded = note_encoded(monkeypatch)
    again = ask(llm, family, draw(77), document, draw(5), image, draw(10), chunks=(1,))
    assert statuses(again) == ["cached", "cached"]
    assert encoded == []
    forget(llm)
    ask(llm, family, draw(30), image, draw(10), chunk_cache=False)
    assert encoded == [1]


def test_moved_keys_are_those_computed_at_the_new_place(llm, family, monkeypatch):
    """Text and images behind images, where rotary positions are lower than indices."""
    image, other, document = picture(), picture(), draw(40)
    mixed = [draw(10), other, draw(10)]
    placed = note_placed(monkeypatch)
    parts = [draw(21), image, draw(6), document, draw(4), *mixed, draw(10)]
    given, places = prompt(family, *parts)
    boundaries = [(0, places[3][0]), places[3], (places[5][0], places[7][1]), places[8]]
    sampling = greedy(1, params={"boundaries": boundaries, "report": True})
    [output] = llm.generate([given], sampling, use_tqdm=False)
    assert statuses(output) == ["filled"] * 3
    side = worker_side()
    [(moves, blocks)] = placed
    chunks = [(entry, at) for entry, at in moves if entry.kind != "system-tail"]
    assert [at for _, at in chunks] == [places[1][0], places[3][0], places[5][0]]
    gap = 0 if family == "llava" else TOKENS[family] - 5  # an image is 5 tokens wide
    assert [entry.lag for entry, _ in chunks] == [0, gap, gap]
    pictures = {places[1][0]: [image], places[5][0]: mixed}
    for entry, at in chunks:
        behind, images = len(entry.context), None
        if at in pictures:
            images = side.loader._images.sequence(_images_of(llm, family, pictures[at]), behind)
        run = Run([*entry.context, *entry.tokens], 0, side.forward.kv.free_blocks, 0, images)
        captured = side.forward.capture([run], shift=at - entry.lag - behind)
        for part, rows in zip(("k", "v"), captured, strict=True):
            moved = side.paged.reused([(entry, at)], blocks, range(len(side.forward.kv)), part)
            for layer, reused in enumerate(moved):
                computed = rows[layer, behind:].transpose(0, 1)
                assert (reused - computed).abs().max() < 1e-4, (at, part, layer)


def _images_of(llm, family, parts):
    """What a message to the workers says of a text with images."""
    features: list[Any] = []
    side = scheduler_side(llm)
    add = side._add

    def noting(request):
        features.extend(request.mm_features)
        add(request)

    side._add = noting
    try:
        output = ask(llm, family, *parts, draw(3), chunk_cache=False)
    finally:
        side._add = add
    return Images(tuple(output.prompt_token_ids[:-3]), tuple(features))


def test_images_are_filled_in_the_background(llm, family, monkeypatch):
    set_miss_policy(monkeypatch, llm, "background")
    image, tokens = picture(), TOKENS[family]
    first = ask(llm, family, draw(40), image, draw(30))
    assert statuses(first) == ["prefilled"]
    ask(llm, family, draw(10), chunk_cache=False)
    assert waiting_fills(llm) == 0
    forget(llm)
    again = ask(llm, family, draw(50), image, draw(30))
    assert statuses(again) == ["cached"]
    assert report(again)["chunks"][0]["span"] == {"start": 50, "end": 50 + tokens}
    # The same numbers as if it had been filled for the request itself.
    parts = [draw(33), image, draw(30)]
    forget(llm)
    found = ask(llm, family, *parts)
    worker_side().clear()
    forget(llm)
    set_miss_policy(monkeypatch, llm, "fill-first")
    same(found, ask(llm, family, *parts))


@pytest.mark.parametrize("policy", ["composite", "kv-deviation", "query-attention", "sink-link"])
def test_policies_look_at_prompts_with_images(llm, family, policy):
    """Also with images in the question, which are left to vLLM. A repetition has the same numbers."""
    image, document = picture(), draw(60)
    parts = [draw(20), image, document, draw(30), picture(), draw(10)]
    options = {"chunks": (2,), "policy": policy, "recompute_ratio": 0.5}
    first = ask(llm, family, *parts, **options)
    forget(llm)
    same(ask(llm, family, *parts, **options), first)


def test_a_name_chosen_by_a_client_is_no_content(llm, family):
    """vLLM itself believes such names for as long as its caches last; what is stored outlives these."""
    system, document, question = draw(40), draw(50), draw(30)
    first, second = picture(), picture()
    expected = ask(llm, family, system, second, document, question, chunks=(2,))
    for image in (first, second):
        forget(llm)
        output = ask(llm, family, system, image, document, question, chunks=(2,), uuids=["mine"])
    same(output, expected)


def test_with_a_model_that_was_never_tried_only_text_before_images_is_reused(folder, family, monkeypatch):
    if family != "paddle":
        pytest.skip("one model is enough")
    monkeypatch.setattr(support, "READS_IMAGES", ())
    llm = start(folder, miss_policy="fill-first", limit_mm_per_prompt=LIMIT)
    measure_nothing(monkeypatch)
    image, document = picture(), draw(40)
    for parts, chunks, expected in (
        ([draw(20), document, image, draw(10)], (1,), "fill"),
        ([draw(30), document, image, document, draw(10)], (1, 3), "reuse"),
        ([draw(20), image, document, draw(10)], (2,), "plain"),
    ):
        theirs = plain(llm, family, *parts)
        ours = ask(llm, family, *parts, chunks=chunks, recompute_ratio=1.0)
        same(ours, theirs)
        assert report(ours)["mode"] == expected
    assert report(ours)["fallback_reason"] == "multimodal"
