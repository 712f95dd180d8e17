"""Rows of KV in 8 bits: whole numbers from -127 to 127, and a scale for each group of a row's columns."""

import torch
from torch.nn.functional import pad

GROUP = 64
"""Number of columns of a row that share a scale. The last group of a row may be narrower."""
LARGEST = 127
"""Largest number of a group."""
SMALLEST_ROW = 1e-30
"""Groups whose largest number is below this are stored as zeros, because their scales are too small to divide by."""
SCALE = torch.bfloat16
"""Dtype of scales: it has the range of single precision, so that no group is too large or too small for it."""
HALF_SCALE = 512.0
"""Largest scale of rows in half precision. With the next larger scale, a number could be 65532, which is infinite in
half precision."""


def groups_of(dim: int) -> int:
    """Number of scales of a row of ``dim`` numbers."""
    return max(1, -(-dim // GROUP))


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[..., tokens, dim]`` as int8 numbers of that shape and scales ``[..., groups, tokens]``. Each number
    times its scale is at most half a scale off, which is 1/253 of the group's largest number (1/127 where half
    precision ends). A group with a number that is not finite has a scale that is not finite, and reads as NaN."""
    numbers, scales = zip(*map(_quantised_group, torch.split(rows, GROUP, dim=-1)), strict=True)
    return torch.cat(numbers, dim=-1), torch.stack(scales, dim=-2)


def _quantised_group(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[..., tokens, dim]`` of one group, and their scales ``[..., tokens]``."""
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
    """Rows ``[..., tokens, dim]`` in single precision, from what :func:`quantised` returns."""
    rows = numbers.float()
    for part, scale in zip(torch.split(rows, GROUP, dim=-1), scales.float().unbind(-2), strict=True):
        part *= scale[..., None]
    return rows


def padded_to(groups: int) -> int:
    """Scales are padded to a multiple of this many tokens. ``groups``: scales per token, K and V together. Layers
    then begin at multiples of 16 bytes, which fast copies need."""
    return 8 if groups % 2 else 4


def scale_places(tokens: int, groups: int) -> int:
    """Number of places for the scales of one group in ``tokens`` rows, of which the last are not used. ``groups``:
    those of K and V together."""
    together = padded_to(groups)
    return -(-tokens // together) * together


def scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """``[..., groups, tokens]`` scales of K and V in their places, as int8 ``[..., bytes]``."""
    groups, tokens = scales.shape[-2:]
    return pad(scales, (0, scale_places(tokens, groups) - tokens)).flatten(-2).view(torch.int8)
