"""Prompts with images, in a model with M-RoPE and in one without: images and text beside them are reused."""

import random
from typing import Any

import pytest

from kvmosaic.engines.vllm import support
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.messages import Images
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
from tests.engines.vllm.vision import (
    FAMILIES,
    SETTINGS,
    TOKENS,
    WITH_AXES,
    ask,
    forget,
    note_encoded,
    picture,
    plain,
    prompt,
    write,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write(family, tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def engine(folder):
    return start(folder, **SETTINGS)


@pytest.fixture
def llm(engine, monkeypatch):
    """With nothing stored, and nothing in vLLM's own caches."""
    forget(engine, stored=True)
    measure_nothing(monkeypatch)
    return engine


def test_two_images_in_the_same_text_never_share_kv(llm, family):
    system, document, question = draw(40), draw(50), draw(30)
    first, second = picture(), picture()

    def answers(image):
        return ask(llm, family, system, image, document, question, chunks=(2,))

    alone = []
    for image in (first, second):
        forget(llm, stored=True)
        alone.append(answers(image))
    with pytest.raises(AssertionError):
        same(*alone)  # answers depend on images
    forget(llm, stored=True)
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
    for parts, chunks, count in (
        ([draw(77), document, draw(5), image, draw(10)], (1,), 2),
        ([draw(20), image, draw(9), image, document, draw(10)], (4,), 3),
    ):
        again = ask(llm, family, *parts, chunks=chunks, recompute_ratio=0.0)
        assert statuses(again) == ["cached"] * count
        forget(llm)
    assert encoded == []
    ask(llm, family, draw(30), image, draw(10), chunk_cache=False)
    assert encoded == [1]


def test_images_of_other_salts_are_not_shared(llm, family):
    image = picture()

    def answer(salt):
        forget(llm)
        return statuses(ask(llm, family, draw(30), image, draw(10), salt=salt))

    assert answer("mine") == ["filled"]
    assert answer("yours") == ["filled"]
    assert answer(None) == ["filled"]
    assert answer("mine") == ["cached"]


def test_documents_beside_images_are_found_by_their_names(llm, family):
    image, texts = picture(), [" ".join(f"w{token}" for token in draw(count, 400)) for count in (30, 40)]

    def answer(system, *order):
        text = " ".join([system, texts[order[0]], "<image>", texts[order[1]], "w1 w2 w3"])
        sampling = greedy(4, params={"documents": texts, "report": True})
        [output] = llm.generate([{"prompt": text, "multi_modal_data": {"image": [image]}}], sampling, use_tqdm=False)
        forget(llm)
        lengths = [chunk["span"]["end"] - chunk["span"]["start"] for chunk in report(output)["chunks"]]
        return statuses(output), lengths

    statuses_of, lengths = answer("w7 w8 w9", 0, 1)
    assert statuses_of == ["filled"] * 3
    assert lengths == pytest.approx([30, TOKENS[family], 40], abs=2)  # the edges of texts may be left out
    assert answer("w7", 1, 0) == (["cached"] * 3, lengths[::-1])


def test_moved_keys_are_those_computed_at_the_new_place(llm, family, monkeypatch):
    """Text and images behind images, where rotary positions are lower than indices."""
    image, other, document = picture(), picture(), draw(40)
    mixed = [draw(10), other, draw(10)]
    placed = note_placed(monkeypatch)
    parts = [draw(170), image, draw(6), document, draw(4), *mixed, draw(10)]  # behind where entries were computed
    given, places = prompt(family, *parts)
    boundaries = [(0, places[3][0]), places[3], (places[5][0], places[7][1]), places[8]]
    sampling = greedy(1, params={"boundaries": boundaries, "report": True})
    [output] = llm.generate([given], sampling, use_tqdm=False)
    assert statuses(output) == ["filled"] * 3
    side = worker_side()
    [(moves, blocks)] = placed
    chunks = [(entry, at) for entry, at in moves if entry.kind != "system-tail"]
    assert [at for _, at in chunks] == [places[1][0], places[3][0], places[5][0]]
    gap = TOKENS[family] - 5 if family in WITH_AXES else 0  # an image is 5 tokens wide
    assert [entry.lag for entry, _ in chunks] == [0, gap, gap]
    pictures = {places[1][0]: [image], places[5][0]: mixed}
    layers = range(len(side.forward.kv))
    # Read before later requests write to these blocks.
    moved = {
        (at, part): [rows.clone() for rows in side.paged.reused([(entry, at)], blocks, layers, part)]
        for entry, at in chunks
        for part in ("k", "v")
    }
    for entry, at in chunks:
        behind, images = len(entry.context), None
        if at in pictures:
            images = side.loader._images.sequence(_images_of(llm, family, pictures[at]), behind)
        run = Run([*entry.context, *entry.tokens], 0, side.forward.kv.free_blocks, 0, images)
        captured = side.forward.capture([run], shift=at - entry.lag - behind)
        for part, rows in zip(("k", "v"), captured, strict=True):
            for layer, reused in enumerate(moved[at, part]):
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
    forget(llm, stored=True)
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
    llm = start(folder, **SETTINGS | {"chunk_sources": "none"})
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
