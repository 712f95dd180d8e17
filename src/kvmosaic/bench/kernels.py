"""The kernels that move KV, against a plain device copy of the same bytes in the same run. Needs a GPU."""

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.rotation import RotaryColumns
from kvmosaic.kernels.paged import Move, PagedCaches, gather, scatter

BLOCK = 16
REPEATS = 20


def run(context: int, chunk: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """GB/s, read and written, of moving ``context`` tokens in chunks between entries and a paged bf16 cache."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU")
    blocks = random.Random(0).sample(range(2 * context // BLOCK), context // BLOCK)
    shape = (2 * context // BLOCK, BLOCK, heads, 2 * head_dim)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(layers)]
    angles = torch.arange(context + 1)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    table = torch.cat([angles.cos(), angles.sin()], -1).to("cuda", torch.bfloat16)
    paged = PagedCaches(caches, head_dim, [table] * layers, RotaryColumns("k", 0, head_dim, False))
    size = (heads, layers, chunk * 2 * head_dim)
    entries = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(context // chunk)]
    moves = [Move(data, chunk, 1, index * chunk) for index, data in enumerate(entries)]
    nbytes = sum(data.nbytes for data in entries)
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "scatter": lambda: scatter(moves, paged, blocks),
        "gather": lambda: gather(moves, paged, blocks),
    }
    rows: list[dict[str, Any]] = []
    for name, function in work.items():
        times = [_milliseconds(function) for _ in range(REPEATS + 1)][1:]
        ms = statistics.median(times)
        rows.append({"kernel": name, "mb": nbytes / 1e6, "ms": ms, "gb_per_s": 2 * nbytes / ms / 1e6})
    for row in rows:
        row["of_copy"] = row["gb_per_s"] / rows[0]["gb_per_s"]
    return {"device": torch.cuda.get_device_name(), "rows": rows}


def _milliseconds(function: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # the launch is queued meanwhile, so that the GPU's own time is seen
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
