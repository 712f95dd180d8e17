"""Stand-ins for the tokens of images."""

import random

import numpy as np

from kvmosaic.core.stand_ins import FIRST, are_stand_ins, first_stand_in, stand_ins, without_stand_ins


def test_the_same_image_has_the_same_stand_ins_and_no_other():
    names = [random.randbytes(32) for _ in range(50)]
    drawn = [stand_ins(name, 40) for name in names]
    assert drawn == [stand_ins(name, 40) for name in names]
    assert len({number for each in drawn for number in each}) > 50 * 40 - 5  # also from token to token
    assert all(FIRST <= number < 2**31 for each in drawn for number in each)


def test_a_part_of_an_image_begins_like_the_whole():
    name = random.randbytes(32)
    assert stand_ins(name, 100)[:30] == stand_ins(name, 30)
    assert stand_ins(name, 0) == []


def test_stand_ins_are_told_from_tokens():
    tokens = [5, 2**18, *stand_ins(b"image", 2), 7]
    assert are_stand_ins(np.array(tokens, dtype=np.int32)).tolist() == [False, False, True, True, False]
    assert first_stand_in(tokens) == 2
    assert first_stand_in([5, 6]) == 2
    assert without_stand_ins(tokens) == [5, 2**18, 7]
