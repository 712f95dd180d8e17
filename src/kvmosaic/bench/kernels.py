"""Speed of our kernels compared with ceilings measured in the same run. Needs a GPU.

Kernels that move KV are compared with a plain device copy of the same bytes. Attention of chosen tokens is compared
with a matrix product, and with PyTorch's own attention of all tokens."""

import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvmosaic.core.entry import KVFormat, PackedKV
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.rotation import RotaryColumns
from kvmosaic.core.window import WHOLE
from kvmosaic.kernels.paged import Move, PagedCaches, gather, scatter
from kvmosaic.kernels.queries import Asking, Queries, key_ranges_at_once
from kvmosaic.kernels.sparse_attention import sparse_attention

BLOCK = 16
REPEATS = 20
MATRIX = 8192
RATIOS, RUNS = (0.05, 0.15), (1, 4, 16, 64)
"""Shares of the tokens that are queries, and lengths of their runs, in tokens."""


def run(context: int, chunk: int, layers: int, heads: int, group: int, head_dim: int) -> dict[str, Any]:
    """GB/s (bytes read and written) of moving ``context`` tokens in chunks between entries, in bf16 and in 8 bits,
    and a paged bf16 cache; TFLOP/s of attention in one layer, with ``group`` query heads per KV head."""
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU")
    blocks = random.Random(0).sample(range(2 * context // BLOCK), context // BLOCK)
    rows = _moves(context, chunk, layers, heads, head_dim, blocks)
    rows += _attention(context, heads, group, head_dim, blocks)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}


def _moves(
    context: int, chunk: int, layers: int, heads: int, head_dim: int, blocks: list[int]
) -> list[dict[str, Any]]:
    caches = [_cache(context, heads, head_dim) for _ in range(layers)]
    angles = torch.arange(context + 1)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    table = torch.cat([angles.cos(), angles.sin()], -1).to("cuda", torch.bfloat16)
    paged = PagedCaches(caches, head_dim, [table] * layers, RotaryColumns("k", 0, head_dim, False))
    exact, small = (
        [_entry(paged.format(WHOLE, is_int8), chunk) for _ in range(context // chunk)] for is_int8 in (False, True)
    )
    nbytes, small_nbytes = (sum(data.nbytes for data in entries) for entries in (exact, small))
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    moves, small_moves = (
        [Move(data, chunk, 1, index * chunk) for index, data in enumerate(entries)] for entries in (exact, small)
    )
    # The bytes that each reads and writes; the cache's are those of exact entries.
    work: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(source), 2 * nbytes),
        "scatter": (lambda: scatter(moves, paged, blocks), 2 * nbytes),
        "gather": (lambda: gather(moves, paged, blocks), 2 * nbytes),
        "scatter, int8": (lambda: scatter(small_moves, paged, blocks), nbytes + small_nbytes),
        "gather, int8": (lambda: gather(small_moves, paged, blocks), nbytes + small_nbytes),
    }
    rates = {name: (ms := _milliseconds(action), moved / ms / 1e6) for name, (action, moved) in work.items()}
    return [
        {
            "kernel": name,
            "ms": ms,
            "rate": rate,
            "unit": "GB/s",
            "ceiling": "copy",
            "of_ceiling": rate / rates["copy"][1],
        }
        for name, (ms, rate) in rates.items()
    ]


def _entry(kv_format: KVFormat, tokens: int) -> torch.Tensor:
    """Random rows as an entry has them."""
    sizes = kv_format.heads, kv_format.layers, tokens
    k, v = (
        torch.randn(*sizes, dim, dtype=kv_format.dtype, device="cuda") for dim in (kv_format.k_dim, kv_format.v_dim)
    )
    return PackedKV.of(k, v, kv_format).data


def _attention(context: int, heads: int, group: int, head_dim: int, blocks: list[int]) -> list[dict[str, Any]]:
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = [_row("matmul", _milliseconds(lambda: a @ b), 2 * MATRIX**3)]
    q, k, v = torch.randn(3, 1, heads * group, context, head_dim, dtype=torch.bfloat16, device="cuda")
    dense = torch.nn.functional.scaled_dot_product_attention
    per_key = 4 * heads * group * head_dim  # multiplications and additions for one query and one key
    ms = _milliseconds(lambda: dense(q, k, v, is_causal=True))
    rows.append(_row("dense attention", ms, per_key * context * (context + 1) // 2))
    at_once = key_ranges_at_once(a.device, heads)
    cache, rng = _cache(context, heads, head_dim).normal_(), np.random.default_rng(0)
    for ratio in RATIOS:
        for run in RUNS:
            starts = np.sort(rng.permutation(context // run)[: int(ratio * context / run)]) * run
            positions = (starts[:, None] + np.arange(run)).ravel()
            some = torch.randn(len(positions), heads * group, head_dim, dtype=torch.bfloat16, device="cuda")
            queries, out = (
                Queries.of([Asking(positions, blocks)], group, some.device, at_once),
                torch.empty_like(some),
            )

            def attend(q: torch.Tensor = some, queries: Queries = queries, out: torch.Tensor = out) -> None:
                sparse_attention(q, cache, queries, head_dim**-0.5, None, out)

            name = f"attention, {ratio:.0%} in runs of {run}"
            rows.append(_row(name, _milliseconds(attend), per_key * int((positions + 1).sum())))
    for row in rows:
        row |= {"ceiling": "matmul", "of_ceiling": row["rate"] / rows[0]["rate"]}
    return rows


def _row(name: str, ms: float, operations: int) -> dict[str, Any]:
    return {"kernel": name, "ms": ms, "rate": operations / ms / 1e9, "unit": "TFLOP/s"}


def _cache(context: int, heads: int, head_dim: int) -> torch.Tensor:
    shape = (2 * context // BLOCK, BLOCK, heads, 2 * head_dim)
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2)


def _milliseconds(function: Callable[[], object]) -> float:
    """Median time on the GPU."""
    times = []
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # keeps the GPU busy while the launch is queued
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])
