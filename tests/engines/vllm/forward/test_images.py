"""Sequences with images: which embeddings and rotary positions their runs have. Positions are those of a real model's
function; embeddings are numbered."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.core.stand_ins import FIRST
from kvmosaic.engines.vllm.compat.images import ImageModel
from kvmosaic.engines.vllm.forward.images import SequenceImages
from kvmosaic.engines.vllm.forward.runs import Pass, Run, cut, runs_of
from kvmosaic.engines.vllm.messages import ChunkLoad, Images
from kvmosaic.engines.vllm.worker_side.images import LoadImages

BLOCKS = [[3, 1, 4, 5, 9, 2]]
WIDTH, HEIGHT = 4, 3
"""Tokens of an image in either direction."""


class NumberedImages(ImageModel):
    """The embedding of the n-th token of an image that begins at ``start`` is ``1000 * start + n``."""

    def __init__(self, has_axes=True):
        vision = SimpleNamespace(spatial_merge_size=2)
        self._model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        for name in ("iter_mm_grid_thw", "get_mrope_input_positions"):
            method = getattr(PaddleOCRVLForConditionalGeneration, name)
            setattr(self._model, name, method.__get__(self._model))
        self.has_axes = has_axes
        self.encoded = []

    def encode(self, feature):
        self.encoded.append(feature.mm_position.offset)
        return 1000.0 * feature.mm_position.offset + torch.arange(feature.mm_position.get_num_embeds())[:, None]


def image(start, is_embed=None):
    grid = MultiModalFieldElem(torch.tensor([1, 2 * HEIGHT, 2 * WIDTH]), MultiModalBatchedField())
    length = WIDTH * HEIGHT if is_embed is None else len(is_embed)
    place = PlaceholderRange(start, length, is_embed)
    data = MultiModalKwargsItem({"image_grid_thw": grid})
    return MultiModalFeatureSpec(data=data, modality="image", identifier="a", mm_position=place)


TEXT, PICTURE = [10, 11, 12, 13, 14], [FIRST + number for number in range(WIDTH * HEIGHT)]
TOKENS = [*TEXT, *PICTURE, *TEXT, *PICTURE, *TEXT]
"""Images at 5 and 22; 39 tokens."""
IMAGES = Images(tuple(6 if token >= FIRST else token for token in TOKENS), (image(5), image(22)))


def make_pass(*runs):
    return Pass(runs, (8,), torch.device("cpu"))


def test_a_run_has_the_embeddings_of_its_own_tokens():
    model = NumberedImages()
    images = SequenceImages(model, IMAGES)
    runs = [Run(TOKENS[start:end], start, BLOCKS, 0, images) for start, end in ((0, 3), (7, 10), (15, 25), (36, 39))]
    work = make_pass(*runs)
    assert work.has_images
    assert torch.cat(work.image_rows()).flatten().tolist() == [5002, 5003, 5004, 5010, 5011, 22000, 22001, 22002]
    assert work.is_image.sum() == 8
    assert work.token_ids[work.is_image].tolist() == [0] * 8
    assert work.token_ids[~work.is_image].tolist() == [*TEXT[:3], *TEXT, *TEXT[2:]]
    assert model.encoded == [5, 22]  # each once


def test_an_image_of_which_nothing_is_computed_is_not_encoded():
    model = NumberedImages()
    images = SequenceImages(model, IMAGES)
    work = make_pass(Run(TOKENS[17:22], 17, BLOCKS, 0, images), Run(TOKENS[30:], 30, BLOCKS, 0, images))
    assert len(torch.cat(work.image_rows())) == 4
    assert model.encoded == [22]


def test_text_inside_an_image_has_no_embedding():
    mask = torch.tensor([True, True, False, True])
    tokens = [10, FIRST, FIRST + 1, 7, FIRST + 2, 11]
    images = SequenceImages(NumberedImages(False), Images((10, 6, 6, 7, 6, 11), (image(1, mask),)))
    work = make_pass(Run(tokens[2:], 2, BLOCKS, 0, images))
    assert torch.cat(work.image_rows()).flatten().tolist() == [1001, 1002]
    assert work.token_ids.tolist() == [0, 7, 0, 11]


def test_positions_behind_images_are_lower_than_indices():
    work = make_pass(
        Run(TOKENS[3:20], 3, BLOCKS, 0, SequenceImages(NumberedImages(), IMAGES)), Run([30, 31], 8, [[7, 8]])
    )
    t, h, w = work.rotary_positions.tolist()
    assert t == [3, 4, *[5] * 12, 9, 10, 11, 8, 9]
    assert h == [3, 4, *[5] * 4, *[6] * 4, *[7] * 4, 9, 10, 11, 8, 9]
    assert w == [3, 4, *[5, 6, 7, 8] * 3, 9, 10, 11, 8, 9]
    assert work.positions.tolist() == [*range(3, 20), 8, 9]  # where KV lies


def test_without_axes_positions_are_indices():
    images = SequenceImages(NumberedImages(False), IMAGES)
    work = make_pass(Run(TOKENS[3:20], 3, BLOCKS, 0, images))
    assert work.rotary_positions.tolist() == list(range(3, 20))


def test_runs_that_are_cut_keep_their_images():
    images = SequenceImages(NumberedImages(), IMAGES)
    wanted = np.zeros(len(TOKENS), dtype=bool)
    wanted[4:12] = wanted[20:30] = True
    runs = runs_of(wanted, TOKENS, BLOCKS, 0, images)
    first, rest = cut(runs, 5)
    parts = [torch.cat(make_pass(*each).image_rows()) for each in (first, rest)]
    assert torch.equal(torch.cat(parts), torch.cat(make_pass(*runs).image_rows()))


def load_of(chunks):
    prompt = ChunkedPrompt(tuple(TOKENS), tuple(chunks))
    told = {"policy": "none", "blocks": (), "spare": (), "is_findable": True, "fill": True, "is_sliced": False}
    return ChunkLoad(
        request_id="a",
        prompt=prompt,
        digests=(),
        ratio=0,
        start=0,
        end=prompt.question.start,
        shared_until=0,
        is_reported=False,
        images=IMAGES,
        **told,
    )


def test_loads_of_a_step_share_their_images_with_their_own_parts_only():
    """Otherwise an image that is computed twice would be encoded twice."""
    images = LoadImages(NumberedImages())
    first, second = load_of([Span(0, 5)]), replace(load_of([Span(0, 5)]), request_id="b")
    made = [images.of(first), images.of(second)]
    assert made[0] is not made[1]
    assert [images.of(first), images.of(second)] == made
    images.forget()
    assert images.of(first) not in made


@pytest.mark.parametrize(
    ("span", "lag"),
    [
        (Span(0, 5), 0),
        (Span(5, 17), 0),
        (Span(17, 22), 8),  # an image of 12 tokens is as far as 4
        (Span(20, 36), 8),
        (Span(22, 34), 8),
        (Span(34, 38), 16),
        (Span(2, 36), 0),
    ],
)
def test_how_far_a_chunk_is_behind_its_index(span, lag):
    load = load_of([span])
    assert LoadImages(NumberedImages()).lag(load, span) == lag
    assert LoadImages(NumberedImages(False)).lag(load, span) == 0


def test_a_chunk_alone_has_the_positions_that_it_has_in_its_prompt():
    images, span = LoadImages(NumberedImages()), Span(20, 36)
    load = load_of([span])
    alone = images.sequence(IMAGES.inside(span), 3)
    whole = images.of(load)
    assert whole is images.of(load)
    assert alone.positions[:, :3].tolist() == [[0, 1, 2]] * 3
    distance = whole.positions[:, 20:36] - alone.positions[:, 3:]
    assert (distance == 20 - 8 - 3).all()
    tokens = [1, 2, 3, *TOKENS[20:36]]
    rows = [torch.cat(make_pass(Run(each, 0, BLOCKS, 0, alone)).image_rows()) for each in (tokens, tokens[:8])]
    assert [len(each) for each in rows] == [12, 3]
