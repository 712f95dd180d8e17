"""Requests with images: these are told apart by their content, and text beside them is reused where that is right."""

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from kvmosaic.core.key import content_hash
from kvmosaic.core.prompt import Span
from kvmosaic.core.stand_ins import FIRST as FIRST_STAND_IN
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.compat.images import keep_whole
from kvmosaic.engines.vllm.messages import Images
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.fair_queue import FairQueue, WaitingChunk
from kvmosaic.engines.vllm.scheduler_side.planner import Planner
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SINK,
    SYSTEM,
    Side,
    make_request,
    make_setup,
    make_shape,
)

PICTURE = [5] * 20
"""Placeholders: the tokens of every image."""
IN_SHARED_MEMORY = MultiModalKwargsItem(
    {name: MultiModalFieldElem(data=7, field=MultiModalBatchedField()) for name in ("address", "monotonic_id")}
)
"""What vLLM's scheduler sees of an image that the API server and the workers share."""


def pixels(seed, dtype=torch.float32):
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def image(start, seed=0, *, name=None, length=20, modality="image", is_embed=None, data=...):
    """An image as vLLM describes it; by default its name says what it contains."""
    if data is ...:
        elements = {"pixel_values": MultiModalFieldElem(data=pixels(seed), field=MultiModalBatchedField())}
        data = MultiModalKwargsItem(elements)
    place = PlaceholderRange(start, length, is_embed)
    return MultiModalFeatureSpec(data=data, modality=modality, identifier=name or f"hash {seed}", mm_position=place)


def request_of(*parts, images, **more):
    return make_request("request", *parts, fields={"mm_features": images, **more.pop("fields", {})}, **more)


def planned(request, reads_images=True, **settings):
    setup = make_setup(make_shape(reads_images=reads_images), **{"chunk_sources": "none", **settings})
    params = RequestParameters.read(request.kv_transfer_params, setup.config.allowed_parameters)
    planner = Planner(setup.config, setup.parser, setup.sink, setup.shape, StoreMirror(1))
    return planner.plan(request, params).outcome


def test_two_images_in_the_same_text_have_different_names():
    def digests(seed, **changes):
        ours = planned(request_of(SYSTEM, [*FIRST, *PICTURE], QUESTION, images=[image(60, seed, **changes)]))
        assert ours.prompt.chunks == (Span(20, 80),)
        return ours.digests

    assert digests(1) == digests(1)
    assert digests(1) != digests(2)
    # A client may call different images by the same name, and the same image by different ones.
    assert digests(1, name="mine") != digests(2, name="mine")
    assert digests(1, name="mine") != digests(1, name="yours")


def test_blocks_behind_different_images_have_different_hashes():
    """Also those that a policy chose with an image of a later part of the prompt in view."""

    def hashes(seed, at):
        parts = [SYSTEM, FIRST, PICTURE, SECOND, QUESTION]
        side = Side(shape={"reads_images": True}, recompute_ratio=0.5)
        request = request_of(*parts, images=[image(at, seed)], policy="composite", recompute_ratio=0.5)
        side.add(request)
        return list(request.block_hashes)

    first, second = hashes(1, 60), hashes(2, 60)
    assert len(first) == 8
    assert not set(first[2:]) & set(second[2:])
    assert first[:1] == second[:1]  # before all chunks


def test_images_are_chunks_of_their_own():
    images = [image(20, 1), image(80, 2), image(100, 1)]
    ours = planned(
        request_of(SYSTEM, PICTURE, FIRST, PICTURE, PICTURE, QUESTION, images=images, boundaries=None),
        chunk_sources="images",
    )
    assert ours.prompt.chunks == (Span(20, 40), Span(80, 100), Span(100, 120))
    first, second, third = ours.digests
    assert first == third != second
    tokens = ours.prompt.tokens_of(Span(20, 40))
    assert min(tokens) >= FIRST_STAND_IN
    assert first == content_hash(tokens, SINK)
    assert ours.images_in(Span(20, 40)).token_ids == tuple(PICTURE)
    assert [each.mm_position.offset for each in ours.images_in(Span(20, 40)).features] == [0]
    assert [each.mm_position.offset for each in ours.images.before(120).features] == [20, 80, 100]


def test_short_images_are_ordinary_text_of_their_prompts():
    settings = {"chunk_sources": "images", "min_chunk_tokens": 21}
    tokens = [*SYSTEM, *PICTURE, *FIRST, *QUESTION]
    boundaries = [(0, 40), (40, 80), (80, 90)]
    ours = planned(request_of(tokens, images=[image(20)], boundaries=boundaries), **settings)
    assert ours.prompt.chunks == (Span(40, 80),)
    assert len(ours.images.before(80).features) == 1


def test_text_of_images_stays_text():
    """Some tokens of an image are no embeddings, like the ends of its rows."""
    mask = torch.tensor([True] * 9 + [False] + [True] * 9 + [False])
    ours = planned(request_of(SYSTEM, PICTURE, QUESTION, images=[image(20, is_embed=mask)]))
    tokens = ours.prompt.tokens_of(Span(20, 40))
    assert [token >= FIRST_STAND_IN for token in tokens] == mask.tolist()
    assert tokens[9] == tokens[19] == PICTURE[0]


@pytest.mark.parametrize(
    ("chunk", "is_reused"),
    [((20, 40), True), ((20, 61), False), ((60, 80), True), ((61, 81), False), ((20, 80), True), ((80, 90), True)],
)
def test_a_chunk_that_cuts_an_image_is_ordinary_text(chunk, is_reused):
    tokens = [*SYSTEM, *FIRST, *PICTURE, *SECOND, *QUESTION]
    boundaries = [(0, chunk[0]), chunk, (chunk[1], len(tokens))]
    ours = planned(request_of(tokens, images=[image(60)], boundaries=boundaries))
    assert (ours.prompt.chunks == (Span(*chunk),)) if is_reused else (ours is Fallback.MULTIMODAL)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"modality": "video"}, {}),
        ({"data": None}, {}),
        ({"data": IN_SHARED_MEMORY}, {}),
        ({"is_embed": torch.tensor([True] * 7 + [False] * 13)}, {}),
        ({}, {"reads_images": False}),
        ({}, {"chunk_context": "system"}),
    ],
    ids=["video", "no-data", "shared-memory", "few-tokens", "not-tested", "after-the-system-prompt"],
)
def test_text_before_what_cannot_be_read_is_reused(changes, settings):
    def plan(*parts, at):
        request = request_of(*parts, images=[image(at, **changes)])
        return planned(request, **{"chunk_sources": "images", **settings})

    before = plan(SYSTEM, FIRST, PICTURE, SECOND, QUESTION, at=60)
    assert isinstance(before, ChunkRequest)
    assert before.prompt.chunks == (Span(20, 60),)
    assert before.images.before(before.prompt.question.start) is None
    assert plan(SYSTEM, PICTURE, FIRST, QUESTION, at=20) is Fallback.MULTIMODAL


def test_inputs_that_overlap_are_left_to_vllm():
    images = [image(60, 1), image(70, 2, length=4)]
    tokens = [*SYSTEM, *FIRST, *PICTURE, *SECOND, *QUESTION]
    for chunk, is_reused in (((20, 60), True), ((62, 68), False), ((80, 120), False)):
        boundaries = [(0, chunk[0]), chunk, (chunk[1], len(tokens))]
        ours = planned(request_of(tokens, images=images, boundaries=boundaries), chunk_sources="images")
        assert isinstance(ours, ChunkRequest) if is_reused else ours is Fallback.MULTIMODAL


def test_a_prompt_whose_only_chunks_would_be_images_is_plain_where_these_cannot_be_read():
    request = request_of([*SYSTEM, *PICTURE, *QUESTION], images=[image(20)])
    assert planned(request, reads_images=False, chunk_sources="images") is None


def test_a_load_has_the_images_before_its_question():
    side = Side(shape={"reads_images": True, "step_tokens": 256}, miss_policy="fill-first", chunk_sources="none")
    images = [image(60, 1), image(120, 2)]
    request = side.add(request_of(SYSTEM, FIRST, PICTURE, SECOND, PICTURE, QUESTION, images=images))
    external, _ = side.ask(request)
    assert external == 140
    side.give(request, external, more=10)
    [load] = side.step().loads
    assert [each.mm_position.offset for each in load.images.features] == [60, 120]
    assert load.images.token_ids == tuple(request.prompt_token_ids)
    assert load.prompt.token_ids != load.images.token_ids


def test_missing_images_are_filled_in_the_background_from_their_pixels():
    side = Side(shape={"reads_images": True}, chunk_sources="images")
    request = side.add(request_of([*SYSTEM, *PICTURE, *QUESTION], images=[image(20, 3)]))
    assert side.ask(request) == (0, False)
    side.give(request, 0, more=50)
    [fill] = side.run(request.request_id, 1, 50).fills
    [(_, tokens)] = fill.chunks
    assert len(tokens) == len(PICTURE)
    [images] = fill.images
    assert torch.equal(images.features[0].data["pixel_values"].data, pixels(3))


def test_workers_get_the_pixels_of_requests_that_vllm_believes_to_be_computed():
    """A request may be preempted, and its images computed by vLLM after all."""
    side = Side(shape={"reads_images": True}, chunk_sources="images")
    features = [image(20, 3)]
    request = side.add(request_of([*SYSTEM, *PICTURE, *QUESTION], images=features))
    stripped, others = [image(20, 3, data=None)], [image(0, 4, data=None)]
    new = [
        SimpleNamespace(req_id=request.request_id, mm_features=stripped),
        SimpleNamespace(req_id="other", mm_features=others),
    ]
    keep_whole(SimpleNamespace(scheduled_new_reqs=new), side.scheduler.features_of)
    assert [each.mm_features for each in new] == [features, others]


def test_images_that_wait_to_be_filled_never_take_more_than_a_gibibyte():
    """An image of few tokens may have many pixels, and clients choose how many."""
    pixels = torch.zeros(4 * 2**20)  # all images share them here
    data = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())})
    inside = Images(tuple(PICTURE), (image(0, data=data),))
    queue = FairQueue()
    queue.add(WaitingChunk("request", bytes([number]), tuple(PICTURE), (), images=inside) for number in range(200))
    assert 1 < len(queue) <= 2**30 // pixels.nbytes
    queue.add([WaitingChunk("other", b"text", tuple(FIRST), ())])
    assert queue.get(b"text") is not None
