"""Rows of KV in 8 bits: whole numbers from -127 to 127, and a scale for each row of a head."""

import torch
from torch.nn.functional import pad

LARGEST = 127
"""Largest number of a row."""
SMALLEST_ROW = 1e-30
"""Rows whose largest number is below this are stored as zeros: their scales could not be divided by."""
SCALE = torch.bfloat16
"""Dtype of scales: it has the range of single precision, so that no row is too large or too small for it."""
HALF_SCALE = 512.0
"""Largest scale of rows in half precision: with the next one, they could reach 65532, which is infinite there."""
TOGETHER = 4
"""Number of tokens that the scales of a layer are padded to a multiple of: with a scale of K and one of V for each
token, layers then begin at multiples of 16 bytes, as fast copies need them to."""


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[..., dim]`` as int8 numbers of that shape and scales ``[...]``. Each number times its scale is at
    most half a scale off, which is 1/253 of the row's largest number (1/127 where half precision ends). A row with a
    number that is not finite has a scale that is not finite, and reads as NaN."""
    is_half, rows = rows.dtype == torch.float16, rows.float()
    largest = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    largest = torch.where(largest < SMALLEST_ROW, 0.0, largest)
    # Rounded before anything is divided by it, so that rounding a scale costs nothing.
    scales = (largest / LARGEST).to(SCALE).float()
    usable = (scales > 0) & scales.isfinite()
    if is_half:
        scales = torch.where(usable, scales.clamp(max=HALF_SCALE), scales)
    inverse = torch.where(usable, 1 / scales, 0.0)
    numbers = torch.floor(rows * inverse[..., None] + 0.5).clamp(-LARGEST, LARGEST)
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
