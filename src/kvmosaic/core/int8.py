"""Rows of KV in 8 bits: whole numbers from -127 to 127, and a scale for each row of a head."""

import torch
from torch.nn.functional import pad

LARGEST = 127
"""Largest number of a row."""
SMALLEST_ROW = 1e-30
"""Rows whose largest number is below this are stored as zeros: their scales could not be divided by."""
SCALE = torch.bfloat16
"""Dtype of scales: it has the range of single precision, so that no row is too large or too small for it."""
KEPT_BITS = -(2**16)
"""Mask of the bits of a single precision number that its bfloat16 has."""
TOGETHER = 4
"""Number of tokens that the scales of a layer are padded to a multiple of: with a scale of K and one of V for each
token, layers then begin at multiples of 16 bytes, as fast copies need them to."""


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[..., dim]`` as int8 numbers of that shape and scales ``[...]``. Each number times its scale is at
    most half a scale off, and so at most 1/254 of the row's largest number. A row with a number that is not finite
    has a scale that is not finite, and reads as NaN."""
    rows = rows.float()
    largest = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    largest = torch.where(largest < SMALLEST_ROW, 0.0, largest)
    # Rounded down, and before anything is divided by it: rounding a scale then costs nothing, and no row can grow
    # beyond the largest number of the model's dtype.
    scales = ((largest / LARGEST).view(torch.int32) & KEPT_BITS).view(torch.float32)
    usable = (scales > 0) & scales.isfinite()
    inverse = torch.where(usable, 1 / scales, 0.0)
    numbers = torch.floor(rows * inverse[..., None] + 0.5)
    return torch.where(usable[..., None], numbers, 0.0).to(torch.int8), scales.to(SCALE)


def dequantised(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., dim]`` in single precision."""
    return numbers.float() * scales.float()[..., None]


def scale_places(tokens: int) -> int:
    """Number of places for the scales of ``tokens`` rows, of which the last are not used."""
    return -(-tokens // TOGETHER) * TOGETHER


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """``[..., tokens]`` scales in their places, as int8 ``[..., bytes]``."""
    tokens = scales.shape[-1]
    return pad(scales, (0, scale_places(tokens) - tokens)).contiguous().view(torch.int8)
